"""``python -m growcache``: the command line, and the entry of growcache's own children.

Children are dispatched before the command line is imported: they need neither typer nor
rich, and start in a third of the time without them.
"""

from __future__ import annotations

import importlib
import os
import sys

# The hidden first argument of a child, and the module whose `main` it runs.
CHILDREN = {
    "sampler": "growcache.sampling.worker",
    "serve": "growcache.sampling.serve",
    "gather": "growcache.loading.entry",
    "transform": "growcache.loading.entry",
}


def main() -> None:
    """Run the child named by the first argument, else the command line."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "run" or command in CHILDREN:
        # Nothing here multiplies matrices, and idle BLAS threads spin at every start.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    child = CHILDREN.get(command)
    module = importlib.import_module(child or "growcache.service.cli")
    sys.exit(module.main())


if __name__ == "__main__":
    main()
