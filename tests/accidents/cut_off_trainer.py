"""A trainer that reads a cache while its shards are truncated one after the other.

It prints one JSON line: the counts of delivered, skipped and wrong samples.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    """Train until most shards are truncated."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cache", type=Path)
    parser.add_argument("--framework", default="numpy")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=int, default=3)
    args = parser.parse_args()
    stopped = threading.Event()
    shards = shards_of(args.cache)
    cutter = threading.Thread(target=cut_short, args=(shards, args.seed, args.keep, stopped))
    options = json.loads(args.options)
    if options.pop("transformed", False):
        options["transform"] = unchanged
    print(json.dumps(trained(args.cache, args.framework, options, cutter, stopped)))


def shards_of(cache: Path) -> list[list[Path]]:
    """Return the files of each shard."""
    folder, found = cache / "shards", dict[str, list[Path]]()
    for file in sorted(folder.glob("**/*")):
        if file.is_file() and file.suffix in (".tfrecord", ".npy"):
            number = file.relative_to(folder).parts[0].split(".")[0]
            found.setdefault(number, []).append(file)
    return list(found.values())


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample unchanged, so that the transform's own processes run too."""
    return sample


def cut_short(shards: list[list[Path]], seed: int, keep: int, stopped: threading.Event) -> None:
    """Truncate all but the `keep` largest shards, at random offsets and times."""
    chance = random.Random(seed)
    shards.sort(key=lambda files: sum(file.stat().st_size for file in files))
    doomed = shards[: len(shards) - keep]
    chance.shuffle(doomed)
    for files in doomed:
        stopped.wait(chance.random() * 0.05)
        file = chance.choice(files)
        with file.open("r+b") as opened:
            opened.truncate(int(file.stat().st_size * chance.random()))
    stopped.set()


def trained(
    cache: Path,
    framework: str,
    options: dict[str, Any],
    cutter: threading.Thread,
    stopped: threading.Event,
) -> dict[str, Any]:
    """Run epochs until truncation has ended, then one more; check every sample."""
    found = {"samples": 0, "wrong": 0, "epochs": 0, "skipped": 0}
    loader_type = importlib.import_module(f"growcache.{framework}").EpochLoader
    with loader_type(cache, batch_size=8, min_samples=1, **options) as loader:
        last = False
        while not last:
            last = stopped.is_set()
            for batch in loader:
                if found["samples"] == 0:
                    cutter.start()
                count, wrong = checked({name: np.asarray(v) for name, v in batch.items()})
                found["samples"] += count
                found["wrong"] += wrong
            found["epochs"] += 1
        found["skipped"] = loader.report.skipped
    return found


def checked(batch: dict[str, Any]) -> tuple[int, int]:
    """Return the number of samples in a batch and the number with wrong values."""
    if "data" in batch:
        ends = batch["data_offsets"].tolist()
        values = [batch["data"][a:b] for a, b in itertools.pairwise(ends)]
        mixed = [not value.size or bool(value.min() != value.max()) for value in values]
        return len(values), sum(mixed)
    rows = batch["x"]
    wrong = sum(
        bool((row[2:] != row[0] + row[1] * 1000).any()) or bool(row[0] == 0) for row in rows
    )
    return len(rows), wrong


if __name__ == "__main__":
    main()
