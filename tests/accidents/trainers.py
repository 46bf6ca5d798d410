"""Training loops as processes of their own, which are told what to do line by line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 120.0  # to import PyTorch on a busy machine takes many

# Each line of its input is executed; what `say` is given comes back as one line of JSON.
LOOP = """
import json, sys

def say(*values):
    print(json.dumps(values), flush=True)

names = {"say": say, "cache": sys.argv[1]}
for line in sys.stdin:
    exec(json.loads(line), names)
"""
LOADER = """
from growcache.{front} import EpochLoader
loader = EpochLoader(cache, **{options!r})
batches = iter(loader)
"""


class Trainer:
    """A Python process that executes what it is told.

    Attributes:
        process: of it.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, code: str) -> None:
        """Have code executed; ``cache`` is the cache's path there."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def ask(self, code: str) -> list[Any]:
        """Have code executed; return what it says."""
        self.tell(code)
        assert self.process.stdout is not None
        watch = threading.Timer(PATIENCE_SECONDS, self.process.kill)
        watch.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watch.cancel()
        assert line, f"the trainer ended with {self.process.wait()}"
        found: list[Any] = json.loads(line)
        return found

    def end(self, number: signal.Signals) -> int:
        """Send it a signal; return with what it ended."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)


@contextmanager
def trainer(
    cache: Path,
    *first: str,
    prefix: Sequence[str] = (),
    stderr: int | None = None,
    **environment: str,
) -> Iterator[Trainer]:
    """Start a trainer, and have code executed there; it is killed at the end.

    Args:
        cache: that it reads.
        first: code to begin with.
        prefix: a command that starts it, such as ``setpriv``.
        stderr: see `subprocess.Popen`.
        environment: variables to set besides.
    """
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", LOOP, str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdin is not None
        made = Trainer(process)
        try:
            for code in first:
                made.tell(code)
            yield made
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # of a line that it did not live to read
                process.stdin.close()


def loading(front: str = "numpy", **options: Any) -> str:
    """Return the code that begins an epoch: ``loader`` and ``batches``."""
    options = {"batch_size": 8, "min_samples": 16, **options}
    return LOADER.format(front=front, options=options)
