"""Other readers of TFRecord files read every shard of a cache, and find what was written.

TensorFlow and the `tfrecord` package register the same protobuf symbols, so each reads in
a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from growcache.schema import Sample
from tests.filled import Filled

pytestmark = pytest.mark.tensorflow

SHARDS = {0: 1, 1: 7, 2: 32}

# Each prints, per record, every field as hexadecimal bytes.
TENSORFLOW = """
import sys
import tensorflow as tf
names = sys.argv[1].split(",")
features = {name: tf.io.FixedLenFeature([], tf.string) for name in names}
for record in tf.data.TFRecordDataset(sys.argv[2:]):
    example = tf.io.parse_single_example(record, features)
    print(*("_" + example[name].numpy().hex() for name in names))
"""
TFRECORD = """
import sys
from tfrecord.reader import tfrecord_loader
names = sys.argv[1].split(",")
for path in sys.argv[2:]:
    for example in tfrecord_loader(path, None, dict.fromkeys(names, "byte")):
        print(*("_" + bytes(example[name]).hex() for name in names))
"""


def sample(name: int) -> Sample:
    values = np.random.default_rng(name)
    return {
        "big": values.random((30, 700)).astype("<f4"),  # longer than a varint of two bytes
        "flags": values.random(5) < 0.5,
        "id": np.array(name),
        "wide": values.integers(0, 2**63, 3, np.uint64),
        "ä": values.random((2, 2)).astype("<f2"),
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    with Filled(tmp_path_factory.mktemp("interop") / "cache", sample) as filled:
        for number, samples in SHARDS.items():
            filled.add(number, samples=samples)
        yield filled


@pytest.mark.parametrize(
    "program",
    [pytest.param(TENSORFLOW, marks=pytest.mark.slow), TFRECORD],
    ids=["tensorflow", "tfrecord"],
)
def test_another_reader_finds_what_was_written(cache: Filled, program: str) -> None:
    paths = [str(cache.cache.layout.shard(number)) for number in SHARDS]
    names = cache.schema.names
    done = subprocess.run(
        [sys.executable, "-c", program, ",".join(names), *paths],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [
        [bytes.fromhex(word[1:]) for word in line.split()] for line in done.stdout.splitlines()
    ]
    expected = [
        [one[name].tobytes() for name in names]
        for number, samples in SHARDS.items()
        for one in cache.samples(number, samples)
    ]
    assert found == expected
