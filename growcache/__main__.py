"""``growcache`` and ``python -m growcache``: the command line, and child processes.

Children are dispatched before the command line is imported. They need neither typer nor rich,
and therefore start in a third of the time.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys

# The hidden first argument of each child, and the module whose `main` it runs.
CHILDREN = {
    "sampler": "growcache.sampling.sampler",
    "ray-writer": "growcache.sampling.engines.ray_writer",
    "serve": "growcache.sampling.serve",
    "gather": "growcache.loading.child_process",
    "transform": "growcache.loading.child_process",
}


def main() -> None:
    """Run the child that the first argument names, or else the command line."""
    exit_codes: list[int] = []
    atexit.register(_exit_if_obstore_ran, exit_codes)  # registered first, so called last
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command == "run" or command in CHILDREN:
        # No matrices are multiplied here, and idle BLAS threads would spin at every start.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    child = CHILDREN.get(command)
    gc.disable()  # modules stay, and scanning them for garbage takes a tenth of the start
    module = importlib.import_module(child or "growcache.cli.cli")
    if child:
        gc.freeze()
    gc.enable()
    exit_codes.append(module.main() or 0)
    sys.exit(exit_codes[0])


def _exit_if_obstore_ran(exit_codes: list[int]) -> None:
    """Exit before the interpreter is finalized, because a thread of obstore would abort it.

    Such a thread outlives the last request for a moment, and aborted one in twelve short
    commands on a bucket. ``exit_codes`` is empty after an error, because Python prints the
    error first.
    """
    if not exit_codes or "obstore" not in sys.modules:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # Python prints it
        return
    os._exit(exit_codes[0])


if __name__ == "__main__":
    main()
