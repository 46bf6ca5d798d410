"""The readers as the harness sees them: processes, and the lines of their logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.processes import send, spawn


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a reader's log; see `reading`.

    Attributes:
        role: The reader's role.
        event: up, beat, warning, wrong, error.
        at: Monotonic seconds.
        facts: All other values.
    """

    role: str
    event: str
    at: float
    facts: dict[str, Any] = field(default_factory=dict)


class ReaderProcess:
    """One of the readers, which is restarted whenever it ends.

    Attributes:
        role: The reader's role.
        samples: Samples verified by all its processes.
        beat_at: The time of its last delivery, in monotonic seconds.
        paused: Whether it is stopped by a signal.
    """

    def __init__(self, role: str, folder: Path, root: Path, seed: int) -> None:
        self.role = role
        self.samples = 0
        self.beat_at = time.monotonic()
        self.paused = False
        self._log = folder / f"{role}.log"
        self._log.touch()
        self._output = folder / f"{role}.out"
        self._read = 0
        self._command = [
            "-m",
            "tests.chaos.reading",
            role,
            str(root),
            str(self._log),
            str(seed),
        ]
        self.start()

    def start(self) -> None:
        """Start a process."""
        with self._output.open("ab") as log:
            self._process = spawn(self._command, log=log)
        self.paused, self.beat_at = False, time.monotonic()

    @property
    def pid(self) -> int:
        """The pid of the latest process."""
        return int(self._process.pid)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the latest process; None while it runs."""
        return self._process.poll()

    def pause(self) -> None:
        """Stop it by a signal, at any point."""
        self.paused = send(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue it."""
        send(self.pid, signal.SIGCONT)
        self.paused = False

    def kill(self) -> None:
        """Kill it, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self.paused = False

    def news(self) -> list[Line]:
        """Return the lines that were logged since the last call."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = [self._line(json.loads(text)) for text in whole.splitlines()]
        for line in lines:
            if line.event == "beat":
                self.samples += line.facts["samples"]
                self.beat_at = line.at
        return lines

    def _line(self, values: dict[str, Any]) -> Line:
        return Line(self.role, values.pop("event"), values.pop("at"), values)

    def last_words(self) -> str:
        """Return the end of its output."""
        size = os.path.getsize(self._output)  # noqa: PTH202
        with self._output.open("rb") as file:
            file.seek(max(0, size - 1500))
            return file.read().decode(errors="replace")
