"""What TensorFlow writes is read without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "first", ["growcache", pytest.param("tensorflow", marks=pytest.mark.slow)]
)
def test_examples_are_read_in_a_process_of_tensorflow(first: str) -> None:
    """Both know tf.train.Example, and no protobuf symbol is registered twice."""
    pytest.importorskip("tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", _BOTH, first], capture_output=True, text=True, timeout=300
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
