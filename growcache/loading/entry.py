"""Where the processes begin that work for a trainer: what ends one there is told to the trainer.

This imports the wire and little else, for a module that cannot be imported is one of the
things that end such a process.
"""

from __future__ import annotations

import importlib
import signal
import socket
import sys

from growcache.loading.wire import Wire

# By the name that ``python -m growcache`` knows the process by.
MODULES = {
    "gather": "growcache.loading.gathering",
    "transform": "growcache.loading.transforming",
}


def main() -> None:
    """Serve who started this process, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the trainer's
    wire = Wire(socket.socket(fileno=int(sys.argv[2])))
    try:
        importlib.import_module(MODULES[sys.argv[1]]).main(wire)
    except BaseException as error:
        wire.tell(error)
        raise
