"""What TensorFlow writes is read without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.formats import open_format
from tests.formats.held import Held, visited


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", ["", "GZIP", "ZLIB"])
def test_records_of_tensorflow(tmp_path: Path, kind: str) -> None:
    tf = pytest.importorskip("tensorflow")
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path), options=tf.io.TFRecordOptions(kind)) as writer:
        for n in range(50):
            features = {
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=[n, 0.5, -n])),
                "n": tf.train.Feature(int64_list=tf.train.Int64List(value=[-n])),
                "b": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes([n])])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    object_format = open_format("tfrecord", {"compression": kind.lower() or "none"})
    found = visited(object_format, Held(path.read_bytes()))
    assert len(found) == 50
    for n, (sample, _, _) in enumerate(found):
        assert sample["x"].dtype == np.float32
        assert sample["x"].tolist() == [n, 0.5, -n]
        assert (int(sample["n"]), sample["b"]) == (-n, bytes([n]))


@pytest.mark.tensorflow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "first", ["growcache", pytest.param("tensorflow", marks=pytest.mark.slow)]
)
def test_examples_are_read_in_a_process_of_tensorflow(first: str) -> None:
    """Both know tf.train.Example, and no protobuf symbol is registered twice."""
    pytest.importorskip("tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", _BOTH, first], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[7]", "[7]", "[7]"]


_BOTH = """
import sys
from growcache.formats.tf_example import parse_example

data = bytes([10, 12, 10, 10, 10, 1, 120, 18, 5, 26, 3, 10, 1, 7])
if sys.argv[1] == "growcache":
    print(parse_example(memoryview(data))["x"])
import tensorflow as tf
print(tf.train.Example.FromString(data).features.feature["x"].int64_list.value)
print(parse_example(memoryview(data))["x"])
if sys.argv[1] == "tensorflow":
    print(tf.io.parse_single_example(data, {"x": tf.io.FixedLenFeature([1], tf.int64)})["x"].numpy())
"""


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.timeout(120)
def test_sequences_of_tensorflow(tmp_path: Path) -> None:
    """Each list as TensorFlow's own parser reads it."""
    tf = pytest.importorskip("tensorflow")
    rng = np.random.default_rng(0)

    def feature(value: Any) -> Any:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        if value.dtype.kind == "f":
            return tf.train.Feature(float_list=tf.train.FloatList(value=value))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))

    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for n in range(40):
            k = n % 5 + 1
            lists = {
                "even": list(rng.random((k, 3), np.float32)),
                "one": list(rng.integers(-5, 5, (k, 1))),
                "uneven": [rng.integers(0, 9, size) for size in (0, *rng.integers(1, 4, k), 7)],
                "frames": [rng.bytes(int(size)) for size in rng.integers(1, 9, k)],
                "codes": [rng.bytes(8) for _ in range(k)],
            }
            example = tf.train.SequenceExample(
                context=tf.train.Features(feature={"n": feature(np.array([n]))})
            )
            for name, steps in lists.items():
                example.feature_lists.feature_list[name].feature.extend(map(feature, steps))
            writer.write(example.SerializeToString())
    wishes = ["even", "one", "uneven", "frames", "n"]
    options = {"features": {**dict.fromkeys(wishes), "codes": ["uint8", None, 8]}}
    found = visited(open_format("tfrecord", options), Held(path.read_bytes()))
    for (sample, _, _), record in zip(found, tf.data.TFRecordDataset(str(path)), strict=True):
        context, lists = tf.io.parse_single_sequence_example(
            record,
            {"n": tf.io.FixedLenFeature([], tf.int64)},
            {
                "even": tf.io.FixedLenSequenceFeature([3], tf.float32),
                "one": tf.io.FixedLenSequenceFeature([], tf.int64),
                "uneven": tf.io.RaggedFeature(tf.int64),
                "frames": tf.io.FixedLenSequenceFeature([], tf.string),
                "codes": tf.io.FixedLenSequenceFeature([], tf.string),
            },
        )
        assert int(sample["n"]) == int(context["n"])
        np.testing.assert_array_equal(sample["even"], lists["even"])
        np.testing.assert_array_equal(sample["one"], lists["one"])
        np.testing.assert_array_equal(sample["uneven"], lists["uneven"].values)
        np.testing.assert_array_equal(sample["uneven_steps"], lists["uneven"].row_lengths())
        ends = np.cumsum(sample["frames_steps"])[:-1]
        frames = [part.tobytes() for part in np.split(sample["frames"], ends)]
        assert frames == lists["frames"].numpy().tolist()
        assert [row.tobytes() for row in sample["codes"]] == lists["codes"].numpy().tolist()
