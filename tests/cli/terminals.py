"""Programs run at a real (pseudo) terminal, as a person would."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

COMMAND = (sys.executable, "-m", "growcache")
ROOT = Path(__file__).parent.parent.parent


class Terminal:
    """A command at a terminal of its own, and what it has written there so far."""

    def __init__(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        columns: int = 80,
        rows: int = 24,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        main, sub = pty.openpty()
        fcntl.ioctl(sub, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=sub,
            stdout=sub,
            stderr=sub,
            cwd=cwd,
            start_new_session=True,
            # Its controlling terminal: Ctrl-C must reach it.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
            env={
                **kept,
                "TERM": "xterm-256color",
                "PYTHONPATH": str(ROOT),
                **(environment or {}),
            },
        )
        os.close(sub)
        self._main = main
        self._data = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """All that was written."""
        return self._data.decode(errors="replace")

    def type(self, line: str) -> None:
        """Type a line, with Enter."""
        os.write(self._main, line.encode() + b"\n")

    def wait_for(self, found: str | Callable[[str], bool], seconds: float = 300) -> str:
        """Return the text once it holds what is awaited."""
        end = time.monotonic() + seconds
        while not (found in self.text if isinstance(found, str) else found(self.text)):
            if time.monotonic() > end or not self._reader.is_alive():
                raise AssertionError(f"{found!r} never came; there is:\n{self.text}")
            time.sleep(0.02)
        return self.text

    def end(self, seconds: float = 300) -> int:
        """Return the exit code once it has ended."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(300)
        os.close(self._main)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while chunk := os.read(self._main, 65536):
                self._data += chunk


@contextlib.contextmanager
def terminal(
    *arguments: str | os.PathLike[str],
    columns: int = 80,
    rows: int = 24,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[Terminal]:
    """Run a growcache command at a terminal until the block ends."""
    started = Terminal(arguments, columns=columns, rows=rows, environment=environment, cwd=cwd)
    try:
        yield started
    finally:
        started.close()
