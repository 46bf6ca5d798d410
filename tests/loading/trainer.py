"""A trainer for tests: it reads a pass slowly, and notes every batch, and its state, on disk.

python -m tests.loading.trainer CACHE NOTES PAUSE_SECONDS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from growcache.loading import plan
from growcache.numpy import EpochLoader
from tests.loading.loaders import as_bytes

OPTIONS = {"batch_size": 3, "min_samples": 1, "seed": 5, "drop_last": False}

WINDOW_BYTES = 20_000  # else all of a small cache is one window


def main(cache: str, notes: str, pause: str) -> None:
    """Read one pass; ``notes/K.json`` appears when batch K was delivered."""
    plan.WINDOW_BYTES = WINDOW_BYTES
    folder = Path(notes)
    with EpochLoader(cache, **OPTIONS) as loader:  # type: ignore[arg-type]
        for number, batch in enumerate(loader, 1):
            note = {"batch": as_bytes(batch).hex(), "state": loader.state_dict()}
            hidden = folder / ".note"
            hidden.write_text(json.dumps(note))
            hidden.rename(folder / f"{number}.json")
            time.sleep(float(pause))


if __name__ == "__main__":
    main(*sys.argv[1:])
