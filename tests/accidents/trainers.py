"""Training loops in processes of their own, which run code that a test sends."""

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

PATIENCE_SECONDS = 120.0  # importing PyTorch on a busy machine is slow

# The loop executes each line of its input; `say` prints its arguments as one line of JSON.
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
    """A Python process that executes code sent by a test.

    Attributes:
        process: The trainer's process.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, code: str) -> None:
        """Execute code in the trainer, where ``cache`` is the cache's path."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def ask(self, code: str) -> list[Any]:
        """Execute code in the trainer; return the values that it passes to `say`."""
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
        """Send the trainer a signal; return its exit status."""
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
    """Start a trainer and execute code there; the trainer is killed at the end.

    Args:
        cache: The cache that it reads.
        first: Code to execute first.
        prefix: A command that starts the trainer, such as ``setpriv``.
        stderr: See `subprocess.Popen`.
        environment: Additional variables.
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
            with suppress(BrokenPipeError):  # the trainer ended before it read a line
                process.stdin.close()


def loading(front: str = "numpy", **options: Any) -> str:
    """Return code that creates ``loader`` and its first epoch, ``batches``."""
    options = {"batch_size": 8, "min_samples": 16, **options}
    return LOADER.format(front=front, options=options)
