"""``growcache`` and ``python -m growcache``: the command line and the entry of child processes.

A child is dispatched before the command line is imported. It needs neither typer nor rich,
so it starts in a third of the time.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys

# The hidden first argument of a child, and the module whose `main` it runs.
CHILDREN = {
    "sampler": "growcache.sampling.worker",
    "serve": "growcache.sampling.serve",
    "gather": "growcache.loading.child_process",
    "transform": "growcache.loading.child_process",
}


def main() -> None:
    """Run the child named by the first argument, else the command line."""
    ended: list[int] = []
    atexit.register(_end_at_once, ended)  # the first of all, so that it is called last
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "run" or command in CHILDREN:
        # Nothing here multiplies matrices, and idle BLAS threads spin at every start.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    child = CHILDREN.get(command)
    gc.disable()  # what is imported stays: to look for garbage in it takes a tenth of the start
    module = importlib.import_module(child or "growcache.cli.cli")
    if child:
        gc.freeze()
    gc.enable()
    ended.append(module.main() or 0)
    sys.exit(ended[0])


def _end_at_once(ended: list[int]) -> None:
    """End while Python is still whole, if obstore was used.

    Its threads outlive the last request by a moment. One that wakes when Python takes itself
    apart aborts the process: of looks at a bucket one in twelve ended so.

    Args:
        ended: with the exit code; empty where there was an error, which Python tells of.
    """
    if not ended or "obstore" not in sys.modules:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # Python tells of it
        return
    os._exit(ended[0])


if __name__ == "__main__":
    main()
