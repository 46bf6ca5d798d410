"""What TensorFlow writes is read without it."""

from __future__ import annotations

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
    form = open_format("tfrecord", {"compression": kind.lower() or "none"})
    found = visited(form, Held(path.read_bytes()))
    assert len(found) == 50
    for n, (sample, _, _) in enumerate(found):
        assert sample["x"].dtype == np.float32
        assert sample["x"].tolist() == [n, 0.5, -n]
        assert (int(sample["n"]), sample["b"]) == (-n, bytes([n]))
