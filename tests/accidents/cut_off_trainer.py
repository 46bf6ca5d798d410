"""A trainer on a cache whose shards are cut short under it, one after the other.

Prints one JSON line: what was delivered and skipped, and how many samples were not those that were stored.
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
    """Train until most shards are cut short."""
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
        options["transform"] = changed
    print(json.dumps(trained(args.cache, args.framework, options, cutter, stopped)))


def shards_of(cache: Path) -> list[list[Path]]:
    """Return the files of each shard."""
    folder, found = cache / "shards", dict[str, list[Path]]()
    for file in sorted(folder.glob("**/*")):
        if file.is_file() and file.suffix in (".tfrecord", ".npy"):
            number = file.relative_to(folder).parts[0].split(".")[0]
            found.setdefault(number, []).append(file)
    return list(found.values())


def changed(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample as it is: what transforms in other processes is tried as well."""
    return sample


def cut_short(shards: list[list[Path]], seed: int, keep: int, stopped: threading.Event) -> None:
    """Cut files short at random places and moments, until only the largest shards are left."""
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
    """Run epochs until nothing is cut short any more, and one more; check each sample."""
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
    """Return how many samples a batch has, and how many are not what they say they are."""
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
