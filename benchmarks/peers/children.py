"""The parent's side of a contestant's process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.peers.cases import Case
from benchmarks.peers.roster import Contestant

ROOT = Path(__file__).parent.parent.parent
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "LITDATA_DISABLE_VERSION_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


class ContestantError(Exception):
    """A contestant failed at its task; the message gives the reason."""


class GoneError(ContestantError):
    """Its process has ended, or was ended."""


class Child:
    """A contestant in a process of its own; a context manager.

    Args:
        contestant: that runs.
        case: whose samples it delivers.
        folder: of its data, made where it is not there.
        python: interpreter of its environment.
    """

    def __init__(self, contestant: Contestant, case: Case, folder: Path, python: Path) -> None:
        self.contestant = contestant
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder.parent / f"{folder.name}.log"
        reader, writer = os.pipe()
        self._answers = os.fdopen(reader, encoding="utf-8")
        words = [contestant.module, json.dumps(asdict(case)), str(folder), str(writer)]
        command: Sequence[str] = [str(python), "-m", "benchmarks.peers.child", *words]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                cwd=ROOT,
                env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
                text=True,
            )
        os.close(writer)

    def ready(self, limit_seconds: float = 120) -> None:
        """Wait until it has imported what it needs."""
        self._answer(limit_seconds)

    def ask(self, limit_seconds: float, **command: Any) -> Any:
        """Send a command and return its answer.

        Raises:
            ContestantError: it failed.
            GoneError: it ended, or took longer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._give_up("ended")
        return self._answer(limit_seconds)

    def _answer(self, limit_seconds: float) -> Any:
        if not select.select([self._answers], [], [], limit_seconds)[0]:
            self.close(min(limit_seconds, 10))  # no more patience than it had
            self._give_up(f"did not answer in {limit_seconds:g} s")
        line = self._answers.readline()
        if not line:
            self._give_up("ended")
        reply: Mapping[str, Any] = json.loads(line)
        if "error" in reply:
            raise ContestantError(f"{self.contestant.title}: {reply['error']}")
        return reply["result"]

    def _give_up(self, what: str) -> NoReturn:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip()[-600:]
        raise GoneError(f"{self.contestant.title} {what}: {said}")

    def end(self) -> None:
        """Let it end, without waiting for that."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self, patience_seconds: float = 10) -> None:
        """Let it end, and make sure that it and its workers do."""
        self.end()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_seconds)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
