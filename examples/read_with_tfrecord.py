"""Read the shards of a cache with the `tfrecord` package: no growcache, no TensorFlow.

    growcache export cache shared       # a copy that nothing leaves
    python examples/read_with_tfrecord.py shared

Needs: pip install tfrecord. A program of its own, since one process cannot import `tfrecord`
and TensorFlow both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tfrecord.reader import tfrecord_loader


def main() -> None:
    parser = argparse.ArgumentParser(description="Read a cache's TFRecord shards.")
    parser.add_argument("cache", type=Path, help="a cache, or what was exported of one")
    arguments = parser.parse_args()

    count = 0
    for path in sorted(arguments.cache.glob("shards/*.tfrecord")):
        for sample in samples_of(path):
            if count == 0:
                print("the first one:", *(described(*item) for item in sample.items()))
            count += 1
    print(f"{count} samples" if count else f"no shards in {arguments.cache}/shards")


def samples_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard; the .json next to it has names, dtypes and shapes."""
    about = json.loads(path.with_suffix(".json").read_bytes())["sidecar"]
    for record in tfrecord_loader(str(path), None):
        yield {
            name: decoded(record[name], dtype, shape, record.get(f"{name}/shape"))
            for name, dtype, shape in about["schema"]
        }


def decoded(data: bytes, dtype: str, shape: list[int | None], found: Any) -> Any:
    """Return a feature as it was cached.

    Args:
        data: each array's bytes, little-endian and in C order.
        dtype: NumPy's name for it, or bytes or str.
        shape: None where samples differ.
        found: this sample's shape, where its bytes would not tell.
    """
    if dtype in ("bytes", "str"):
        return data.decode() if dtype == "str" else data
    known = [-1 if size is None else size for size in shape] if found is None else found
    return np.frombuffer(data, dtype).reshape(known)


def described(name: str, value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{name} {value.dtype}{list(value.shape)}"
    return f"{name} {type(value).__name__}[{len(value)}]"


if __name__ == "__main__":
    main()
