from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from growcache.cache.formats import tfrecord
from growcache.errors import CorruptShardError, FormatError
from growcache.schema import Field, Sample, Schema
from tests.cache.making import SCHEMA, samples_of

DTYPES = ["|b1", "|u1", "<i2", "<u4", "<i8", "<f2", "<f4", "<f8", "<c16"]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Schema, list[Sample]]:
    names = draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3, unique=True))
    try:
        [name.encode() for name in names]
    except UnicodeEncodeError:
        names = ["x"]
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    fields = tuple(
        Field(name, draw(st.sampled_from(DTYPES)), draw(shapes)) for name in sorted(names)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples: list[Sample] = [
        {f.name: rng.integers(0, 2, f.fixed_shape).astype(f.dtype) for f in fields}
        for _ in range(draw(st.integers(0, 4)))
    ]
    return Schema(fields), samples


def written(path: Path, schema: Schema, samples: list[Sample]) -> Path:
    path.write_bytes(encoded(schema, samples))
    return path


def encoded(schema: Schema, samples: list[Sample]) -> bytes:
    return b"".join(bytes(b) for file in tfrecord.encode(schema, samples) for b in file.pieces)


@given(batches())
def test_what_was_encoded_is_read_again(batch: tuple[Schema, list[Sample]]) -> None:
    schema, samples = batch
    data = encoded(schema, samples)
    assert len(data) == len(samples) * tfrecord.record_layout(schema).record_bytes
    shard = tfrecord.shard_in_memory(schema, len(samples), data)
    assert tfrecord.bad_records(shard) == []
    for found, expected in zip(shard, samples, strict=True):
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype


@given(batches())
def test_both_ways_of_encoding_give_the_same_bytes(batch: tuple[Schema, list[Sample]]) -> None:
    schema, samples = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "DIRECT_BYTES", 0)
        direct = encoded(schema, samples)
        patch.setattr(tfrecord, "DIRECT_BYTES", 2**40)
        block = encoded(schema, samples)
    assert direct == block


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(0, 80))
def test_the_largest_array_begins_with_a_line_of_the_cache(
    sizes: list[int], name_bytes: int
) -> None:
    """Wherever it stands, and whatever stands beside it; protobuf reads on over what fills up."""
    names = [chr(ord("a") + i) * (name_bytes + 1) for i in range(len(sizes) + 1)]
    nbytes = dict(zip(names, [*sizes, 4096], strict=True))
    sample = {name: np.full(n, n % 251, np.uint8) for name, n in nbytes.items()}
    schema = Schema.from_sample(sample)
    where = tfrecord.record_layout(schema)
    (start,) = [start for field, start in where.fields if field.nbytes == 4096]
    assert start % 64 == where.record_bytes % 64 == 0
    record = encoded(schema, [sample])
    example = _example_class().FromString(record[12:-4])
    found = {name: f.bytes_list.value[0] for name, f in example.features.feature.items()}
    assert found == {name: array.tobytes() for name, array in sample.items()}


def test_records_of_small_samples_are_not_filled_up() -> None:
    where = tfrecord.record_layout(Schema((Field("x", "|u1", (64,)), Field("y", "<i8", ()))))
    assert where.record_bytes == 64 + 8 + 40


def test_large_arrays_are_not_copied() -> None:
    sample = {"x": np.arange(70_000, dtype="<i4")}
    (file,) = tfrecord.encode(Schema.from_sample(sample), [sample])
    assert any(
        isinstance(b, np.ndarray) and np.shares_memory(b, sample["x"]) for b in file.pieces
    )


def test_columns_are_views_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "s.tfrecord", SCHEMA, samples_of(1, 5))
    shard = tfrecord.open_shard(path, SCHEMA, 5)
    assert shard.fields["x"].shape == (5, 2048)
    assert shard.fields["x"].strides[0] == tfrecord.record_layout(SCHEMA).record_bytes
    assert np.shares_memory(shard.fields["x"], np.frombuffer(shard.memories[0], np.uint8))
    shard.bring()
    shard.close()


def test_a_sample_outlives_the_map(tmp_path: Path) -> None:
    path = written(tmp_path / "s.tfrecord", SCHEMA, samples_of(1, 2))
    shard = tfrecord.open_shard(path, SCHEMA, 2)
    sample, view = shard[1], shard.fields["x"]
    shard.close()
    sample["x"][0] = 7.0
    assert view[0].any()  # the map lives as long as its last view
    with pytest.raises(IndexError):
        shard[0]


@pytest.mark.parametrize("where", [0, 8, 20, -1])
def test_a_flipped_bit_is_found(tmp_path: Path, where: int) -> None:
    path = written(tmp_path / "s.tfrecord", SCHEMA, samples_of(1, 3))
    data = bytearray(path.read_bytes())
    record = tfrecord.record_layout(SCHEMA).record_bytes
    data[record + where if where >= 0 else 2 * record + where] ^= 1
    path.write_bytes(data)
    shard = tfrecord.open_shard(path, SCHEMA, 3)
    assert tfrecord.bad_records(shard) == [1]
    shard.close()


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "s.tfrecord", SCHEMA, samples_of(1, 3))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptShardError, match=r"expected .* bytes for 3 samples"):
        tfrecord.open_shard(path, SCHEMA, 3)
    with pytest.raises(CorruptShardError, match="missing"):
        tfrecord.open_shard(tmp_path / "none", SCHEMA, 3)


def test_samples_of_another_schema_are_refused() -> None:
    with pytest.raises(
        FormatError, match=r"expected x: float32\[16, 32\], found float64\[300\]"
    ):
        tfrecord.encode(SCHEMA, [{"x": np.zeros(300), "y": np.array(1)}])
    with pytest.raises(FormatError, match="found nothing"):
        tfrecord.encode(SCHEMA, [{"x": np.zeros((16, 32), np.float32)}])


def test_what_no_protobuf_can_hold_is_refused() -> None:
    with pytest.raises(FormatError, match="smaller windows"):
        tfrecord.record_layout(Schema((Field("x", "<f4", (2**29,)),)))
    with pytest.raises(FormatError, match="Unicode"):
        tfrecord.record_layout(Schema((Field("\ud800", "<f4", ()),)))


def test_records_are_those_of_protobuf() -> None:
    """The wire bytes, told apart from ours by building them with protobuf itself."""
    example_class = _example_class()
    sample = {"x": np.arange(480, dtype="<f4").reshape(16, 30), "y": np.array(7)}
    example = example_class()
    for name, array in sample.items():
        example.features.feature[name].bytes_list.value.append(array.tobytes())
    data = encoded(Schema.from_sample(sample), [sample])
    assert data[12:-4] == example.SerializeToString(deterministic=True)


@functools.cache
def _example_class() -> Any:
    pytest.importorskip("google.protobuf")
    names = ("descriptor_pb2", "descriptor_pool", "message_factory")
    descriptor_pb2, descriptor_pool, message_factory = (
        importlib.import_module(f"google.protobuf.{name}") for name in names
    )
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")
    bytes_list = file.message_type.add(name="BytesList")
    bytes_list.field.add(
        name="value", number=1, type=types.TYPE_BYTES, label=types.LABEL_REPEATED
    )
    feature = file.message_type.add(name="Feature")
    feature.field.add(
        name="bytes_list",
        number=1,
        type=types.TYPE_MESSAGE,
        label=types.LABEL_OPTIONAL,
        type_name=".t.BytesList",
    )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=types.TYPE_STRING, label=types.LABEL_OPTIONAL)
    entry.field.add(
        name="value",
        number=2,
        type=types.TYPE_MESSAGE,
        label=types.LABEL_OPTIONAL,
        type_name=".t.Feature",
    )
    features.field.add(
        name="feature",
        number=1,
        type=types.TYPE_MESSAGE,
        label=types.LABEL_REPEATED,
        type_name=".t.Features.FeatureEntry",
    )
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features",
        number=1,
        type=types.TYPE_MESSAGE,
        label=types.LABEL_OPTIONAL,
        type_name=".t.Features",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


READ_WITH_TENSORFLOW = """
import sys, numpy as np, tensorflow as tf
features = {"x": tf.io.FixedLenFeature([], tf.string), "y": tf.io.FixedLenFeature([], tf.string)}
rows = [
    (tf.io.decode_raw(r["x"], tf.float32).numpy(), tf.io.decode_raw(r["y"], tf.int64).numpy()[0])
    for r in tf.data.TFRecordDataset(sys.argv[1]).map(
        lambda record: tf.io.parse_single_example(record, features)
    )
]
np.savez(sys.argv[2], x=np.stack([x for x, _ in rows]), y=np.array([y for _, y in rows]))
"""

READ_WITH_THE_PACKAGE = """
import sys, numpy as np
from tfrecord.reader import tfrecord_loader
rows = list(tfrecord_loader(sys.argv[1], None, {"x": "byte", "y": "byte"}))
x = np.stack([np.frombuffer(row["x"], "<f4") for row in rows])
y = np.array([np.frombuffer(row["y"], "<i8")[0] for row in rows])
np.savez(sys.argv[2], x=x, y=y)
"""


@pytest.mark.tensorflow
@pytest.mark.slow  # every day tests/test_interop.py has them read whole caches
@pytest.mark.parametrize(
    ("program", "package"),
    [(READ_WITH_TENSORFLOW, "tensorflow"), (READ_WITH_THE_PACKAGE, "tfrecord")],
    ids=["tensorflow", "tfrecord"],
)
def test_other_readers_read_it(tmp_path: Path, program: str, package: str) -> None:
    """Each in a process of its own: the two cannot be imported into one."""
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import importlib.util as u; exit(not u.find_spec({package!r}))",
        ],
        check=False,
    )
    if found.returncode:
        pytest.skip(f"{package} is not installed")
    path = written(tmp_path / "s.tfrecord", SCHEMA, samples_of(9, 7))
    out = tmp_path / "out.npz"
    subprocess.run(
        [sys.executable, "-c", program, path, out],
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    with np.load(out) as rows:
        for i, sample in enumerate(samples_of(9, 7)):
            assert (rows["x"][i] == sample["x"].ravel()).all()
            assert rows["y"][i] == sample["y"]
