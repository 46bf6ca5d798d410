"""A trainer for tests: it notes the hash of every batch, saves its state now and then, and resumes from that.

python -m tests.journaling_trainer CACHE FOLDER SAMPLES_PER_EPOCH
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from growcache.numpy import EpochLoader
from tests.loading.loaders import as_bytes

STATE_STEPS = 7


def augmented(sample: Any, rng: np.random.Generator) -> dict[str, Any]:
    return {"x": sample["x"] * rng.random(dtype=np.float32)}


def digest(batch: Any) -> str:
    return hashlib.sha256(as_bytes(batch)).hexdigest()


def main(cache: str, folder: str, samples_per_epoch: str) -> None:
    state, notes = Path(folder) / "state.json", Path(folder) / "seen"
    with (
        EpochLoader(
            cache,
            batch_size=6,
            min_samples=30,
            samples_per_epoch=int(samples_per_epoch) or None,
            seed=11,
            transform=augmented,
            journal=Path(folder) / "a.journal",
        ) as loader,
        notes.open("a") as seen,
    ):
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text()))
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            step = loader.global_step - 1
            print(step, digest(batch), file=seen, flush=True)
            if step % STATE_STEPS == 0:
                hidden = state.with_suffix(".new")
                hidden.write_text(json.dumps(loader.state_dict()))
                hidden.rename(state)
            time.sleep(0.002)


if __name__ == "__main__":
    main(*sys.argv[1:])
