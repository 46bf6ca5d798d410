"""Read the shards of a cache with the `tfrecord` package, without growcache or TensorFlow.

    growcache export cache shared       # a copy from which nothing is evicted
    python examples/read_with_tfrecord.py shared

Needs: pip install tfrecord. This is a separate program, because one process cannot import both
`tfrecord` and TensorFlow.
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
    parser.add_argument("cache", type=Path, help="a cache or an export of it")
    arguments = parser.parse_args()

    count = 0
    for path in sorted(arguments.cache.glob("shards/*.tfrecord")):
        for sample in samples_of(path):
            if count == 0:
                print("the first sample:", *(described(*item) for item in sample.items()))
            count += 1
    print(f"{count} samples" if count else f"no shards in {arguments.cache}/shards")


def samples_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a shard. The .json next to it has names, dtypes and shapes."""
    about = json.loads(path.with_suffix(".json").read_bytes())["sidecar"]
    for record in tfrecord_loader(str(path), None):
        yield {
            name: decoded(record[name], dtype, shape, record.get(f"{name}/shape"))
            for name, dtype, shape in about["schema"]
        }


def decoded(data: bytes, dtype: str, shape: list[int | None], found: Any) -> Any:
    """Return the cached field of a feature.

    Args:
        data: the bytes of an array, little-endian and in C order.
        dtype: NumPy's name of the dtype, or bytes or str.
        shape: None for a dimension that differs between samples.
        found: this sample's shape, if the number of bytes does not determine it.
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
