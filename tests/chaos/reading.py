"""The program of a reader: it trains nothing, and checks every sample that it receives.

``python -m tests.chaos.reading KIND CACHE LOG SEED``. It writes one line of JSON per event to
its log, which survives the process.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.content import wrong
from tests.chaos.schedule import RESUMABLE, STOPPED, TENSORFLOW, TORCH, UNFINISHED

BATCH = 32
MIN_SAMPLES = 256  # so that one damaged shard leaves enough samples for a batch
PAUSE_SECONDS = {
    TORCH: 0.01,
    TENSORFLOW: 0.015,
    STOPPED: 0.02,
    UNFINISHED: 0.1,
    RESUMABLE: 0.05,
}
BEAT_SECONDS = 0.25
FAILED = 3  # exit code after an error, which is in the log


class Log:
    """An append-only file of whole lines."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, event: str, **facts: Any) -> None:
        """Append a line."""
        line = json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **facts})
        os.write(self._descriptor, line.encode() + b"\n")


class _Corrupt(logging.Handler):
    """Writes the loaders' warnings to the log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.say("warning", message=record.getMessage())


class Reader:
    """Counts and checks the samples that a loader delivers.

    Args:
        log: The log to write to.
        pause_seconds: The duration of a training step.
    """

    def __init__(self, log: Log, pause_seconds: float) -> None:
        self._log = log
        self._pause = pause_seconds
        self._samples = self._batches = 0
        self._objects: set[int] = set()
        self._objects_since = 0.0
        self._epochs = 0
        self._told = 0.0
        # The batches of an epoch were verified after the previous epoch had started.
        self.verified_since = self._began = time.monotonic()

    def epoch(self, batches: Iterable[Any]) -> Iterator[None]:
        """Take the batches of an epoch and check them."""
        self.verified_since, self._began = self._began, time.monotonic()
        for batch in batches:
            values = batch["x"]
            # Heavy-tailed samples: every loader delivers their rows concatenated.
            self._check(np.asarray(getattr(values, "flat_values", values)))
            time.sleep(self._pause)
            yield
        self._epochs += 1

    def _check(self, words: Any) -> None:
        bad = wrong(words)
        if bad.any():
            heads = words[bad][:4, :3].tolist()
            self._log.say(
                "wrong", samples=int(bad.sum()), heads=heads, since=self.verified_since
            )
        self._samples, self._batches = self._samples + len(words), self._batches + 1
        if not self._objects:  # short epochs end between two beats
            self._objects_since = self.verified_since
        self._objects.update(np.unique(words[~bad, 0]).tolist())
        if time.monotonic() - self._told > BEAT_SECONDS:
            self._told = time.monotonic()
            self._log.say(
                "beat",
                samples=self._samples,
                epochs=self._epochs,
                objects=sorted(self._objects),
                since=self._objects_since,
            )
            self._samples = 0
            self._objects.clear()


def _loader(kind: str, root: str, seed: int) -> Any:
    options: dict[str, Any] = {
        "batch_size": BATCH, "min_samples": MIN_SAMPLES, "seed": seed, "job": kind, "verify": "always",
    }  # fmt: skip
    if kind == TORCH:
        from growcache.torch import EpochLoader

        return EpochLoader(root, **options)
    if kind == TENSORFLOW:
        from growcache.tensorflow import dataset

        return dataset(root, **options)
    from growcache.numpy import EpochLoader as NumpyLoader

    return NumpyLoader(root, **options)


def read(kind: str, root: str, log: Log, seed: int) -> None:
    """Read epoch after epoch, for ever; the unfinished reader breaks off each of them."""
    reader, dice = Reader(log, PAUSE_SECONDS[kind]), random.Random(seed)
    try:
        loader = _loader(kind, root, seed)
        log.say("up")
        while True:
            until = time.monotonic() + dice.uniform(2, 12)
            for _ in reader.epoch(loader):
                if kind == RESUMABLE:
                    loader.state_dict()
                if kind == UNFINISHED and time.monotonic() > until:
                    break
    except Exception as error:  # noqa: BLE001 - the harness judges every error
        log.say(
            "error",
            type=type(error).__name__,
            message=str(error)[:2000],
            trace=traceback.format_exc()[-3000:],
            since=reader.verified_since,
        )
        sys.stdout.flush()
        os._exit(FAILED)


def main() -> None:
    """Run the reader that the arguments name."""
    kind, root, path, seed = sys.argv[1:5]
    log = Log(Path(path))
    logging.getLogger("growcache").addHandler(_Corrupt(log))
    read(kind, root, log, int(seed))


if __name__ == "__main__":
    main()
