"""What a service and its samplers write to the error stream, printed above the live picture.

Samplers inherit the stream, and run what users wrote and import what users chose: a
``print`` or a warning of theirs would else go right through the picture.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Self

from rich.console import Console

STDERR = 2
CHUNK_BYTES = 1 << 16
PAUSE_SECONDS = 0.1  # each print draws the picture anew
END_SECONDS = 2.0


class ErrorsAbove:
    """Within the block, the error stream of this process and of its children is a pipe.

    Args:
        console: that prints what comes through; it must not be the error stream's.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._saved = self._read = -1
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> Self:
        sys.stderr.flush()
        self._saved = os.dup(STDERR)
        self._read, write = os.pipe()
        os.dup2(write, STDERR)
        os.close(write)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        sys.stderr.flush()
        os.dup2(self._saved, STDERR)
        os.close(self._saved)
        self._thread.join(END_SECONDS)  # the pipe ends with the last child that has it

    def _pass_on(self) -> None:
        rest = b""
        while chunk := os.read(self._read, CHUNK_BYTES):
            whole, end, rest = (rest + chunk).rpartition(b"\n")
            if end:
                self._print(whole)
                time.sleep(PAUSE_SECONDS)
        if rest:
            self._print(rest)
        os.close(self._read)

    def _print(self, data: bytes) -> None:
        text = data.decode(errors="replace")
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
