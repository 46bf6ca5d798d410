"""What every cache format must do with every kind of sample, and what it must refuse."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from growcache.cache.check import check
from growcache.cache.directory import adopt
from growcache.cache.files import RECORDS, CacheLayout
from growcache.cache.folders import remove_shard
from growcache.cache.formats import CACHE_FORMATS, encoding, npy, open_shard, shard_files
from growcache.cache.formats.encoding import EncodedFile
from growcache.cache.formats.mapped import MappedShard
from growcache.cache.incoming import ShardChecksum, encode_shard
from growcache.cache.side_files import Identity
from growcache.cache.sidecar import Origins, Sidecar
from growcache.errors import CorruptShardError, FormatError
from growcache.schema import Field, Sample, Schema
from tests.cache.making import KINDS, add, equal, make, opened, samples_of

FORMATS = sorted(CACHE_FORMATS)
N = 12
Case = tuple[Schema, list[Sample]]


def declared(*fields: Field) -> Schema:
    return Schema(tuple(sorted(fields, key=lambda field: field.name)))


def fixed(name: str, array: Any) -> Case:
    array = np.asarray(array)
    return Schema.from_sample({name: array}), [{name: array} for _ in range(N)]


def ragged(dtype: str, shape: tuple[int | None, ...]) -> Case:
    rng = np.random.default_rng(len(shape))
    found: list[Sample] = []
    for i in range(N):
        sizes = [i % 4 if size is None else size for size in shape]
        found.append({"x": rng.integers(0, 2, sizes).astype(dtype)})
    return Schema((Field("x", np.dtype(dtype).newbyteorder("<").str, shape),)), found


CASES: dict[str, Case] = {
    "fixed": (KINDS["npy-fixed"].schema, samples_of(3, N)),
    "ragged": (KINDS["npy-ragged"].schema, samples_of(3, N, KINDS["npy-ragged"].schema)),
    "one ragged dimension first": ragged("<f4", (None, 3)),
    "one ragged dimension last": ragged("<f4", (3, None)),
    "two ragged dimensions": ragged("<i2", (None, 2, None)),
    "ragged beside a dimension of zero": ragged("<f4", (None, 0)),
    "a dimension of zero before a ragged one": ragged("<f4", (0, None)),
    "ragged and empty": (
        declared(Field("x", "<f8", (None,))),
        [{"x": np.empty(0, "<f8")} for _ in range(N)],
    ),
    "ragged bool": ragged("|b1", (None,)),
    "ragged complex64": ragged("<c8", (None, None)),
    "bytes": (
        declared(Field("data", "bytes", ())),
        [{"data": os.urandom(i * i)} for i in range(N)],
    ),
    "str": (
        declared(Field("note", "str", ())),
        [{"note": "ä€😀"[: i % 4] + "\0" * (i % 2)} for i in range(N)],
    ),
    "0-d": fixed("y", np.int64(7)),
    "zero-length dimensions": fixed("x", np.zeros((3, 0, 2), "<f4")),
    "bool": fixed("x", [True, False, True]),
    "float16": fixed("x", np.arange(7, dtype="<f2")),
    "complex64": fixed("x", np.arange(7, dtype="<c8") * 1j),
    "big-endian": fixed("x", np.arange(6, dtype=">i4").reshape(2, 3)),
    "Fortran order": fixed("x", np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    "ragged big-endian": ragged(">f8", (None, 2)),
    "unicode names": (
        declared(
            Field("ä/€ %.", "<f4", (2,)), Field("..", "bytes", ()), Field("a.b", "|u1", ())
        ),
        [
            {"ä/€ %.": np.ones(2, "<f4"), "..": b"x" * i, "a.b": np.array(i, "|u1")}
            for i in range(N)
        ],
    ),
    "names that sort among shapes": (
        declared(
            Field("x", "<f4", (None, None)), Field("x!", "bytes", ()), Field("x0", "str", ())
        ),
        [{"x": np.ones((i, 2), "<f4"), "x!": b"!" * i, "x0": str(i)} for i in range(N)],
    ),
    "large values": (
        declared(Field("x", "<f4", (None,)), Field("y", "<i8", ())),
        [{"x": np.arange(30_000 * (i % 3), dtype="<f4"), "y": np.array(i)} for i in range(N)],
    ),
}
each_format = pytest.mark.parametrize("cache_format", FORMATS)
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def conformed(case: Case, count: int = N) -> Case:
    schema, samples = case
    return schema, [schema.conform(sample) for sample in samples[:count]]


def put(root: Path, cache_format: str, schema: Schema, samples: list[Sample]) -> Sidecar:
    """Write shard 1 without a cache around it; return its description."""
    packed, seal = encode_shard(cache_format, schema, samples), ShardChecksum()
    for file in packed.files:
        path = CacheLayout(root).shard(1, file.suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(bytes, seal.passing(file))))
        assert path.stat().st_size == file.nbytes
    return seal.on(Sidecar("f", 0, 0, 1, 1, parts=1, origins=Origins(), **packed.facts))


def content(file: EncodedFile) -> bytes:
    return b"".join(map(bytes, file.pieces))


def reopened(root: Path, cache_format: str, schema: Schema, samples: int) -> MappedShard:
    return open_shard(CacheLayout(root), 1, samples, schema, cache_format)


@each_format
@each_case
@pytest.mark.parametrize("count", [N, 1, 0])
def test_what_was_written_is_read(
    tmp_path: Path, cache_format: str, case: Case, count: int
) -> None:
    schema, samples = conformed(case, count)
    facts = put(tmp_path, cache_format, schema, samples)
    shard = reopened(tmp_path, cache_format, schema, count)
    assert len(shard) == count
    assert all(map(equal, shard, samples))
    assert shard.nbytes == facts.shard_bytes
    assert not count or shard.digest() == facts.digest
    assert CACHE_FORMATS[cache_format].bad_records(shard) == []
    shard.bring()
    assert shard.in_memory
    shard.let_go()
    assert all(map(equal, shard, samples))
    shard.close()
    assert len(shard) == 0


@each_format
@each_case
def test_columns_say_where_the_values_lie(
    tmp_path: Path, cache_format: str, case: Case
) -> None:
    schema, samples = conformed(case)
    put(tmp_path, cache_format, schema, samples)
    shard = reopened(tmp_path, cache_format, schema, N)
    assert {*shard.fields, *shard.ragged} == {*schema.names}
    assert not {*shard.fields} & {*shard.ragged}
    for field in schema.fields:
        for i, sample in enumerate(samples):
            value = sample[field.name]
            raw = value.encode() if isinstance(value, str) else bytes(memoryview(value))
            if field.name in shard.fields:
                assert shard.fields[field.name][i].tobytes() == raw
                continue
            column = shard.ragged[field.name]
            start, length = int(column.starts[i]), int(column.lengths[i])
            assert column.memory[start : start + length].tobytes() == raw
            shape = (len(raw),) if field.is_blob else value.shape
            assert field.shape_of(column.dims[i].tolist()) == shape
    shard.close()


@each_format
@each_case
def test_the_bytes_are_a_function_of_the_samples(
    cache_format: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, samples = conformed(case)
    once = [(f.suffix, content(f)) for f in encode_shard(cache_format, schema, samples).files]
    monkeypatch.setattr(encoding, "DIRECT_BYTES", 0)
    again = encode_shard(cache_format, schema, [dict(sample) for sample in samples])
    assert once == [(f.suffix, content(f)) for f in again.files]
    assert tuple(suffix for suffix, _ in once) == CACHE_FORMATS[cache_format].suffixes(schema)


@each_format
@each_case
def test_a_cut_file_is_refused(tmp_path: Path, cache_format: str, case: Case) -> None:
    schema, samples = conformed(case)
    put(tmp_path, cache_format, schema, samples)
    for path in shard_files(CacheLayout(tmp_path), 1, cache_format):
        whole = path.read_bytes()
        for size in {0, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:size])
            with pytest.raises(CorruptShardError, match="run growcache check"):
                reopened(tmp_path, cache_format, schema, N)
        path.unlink()
        with pytest.raises(CorruptShardError, match="missing"):
            reopened(tmp_path, cache_format, schema, N)
        path.write_bytes(whole)


@each_format
@each_case
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, cache_format: str, case: Case) -> None:
    """And none of them makes an open shard point outside of its files."""
    schema, samples = conformed(case)
    facts = put(tmp_path, cache_format, schema, samples)
    for path in shard_files(CacheLayout(tmp_path), 1, cache_format):
        whole = path.read_bytes()
        places = np.linspace(0, len(whole) - 1, min(len(whole), 40)).astype(int)
        for place in places.tolist():
            data = bytearray(whole)
            data[place] ^= 1 << place % 8
            path.write_bytes(data)
            try:
                shard = reopened(tmp_path, cache_format, schema, N)
            except CorruptShardError:
                continue
            assert shard.digest() != facts.digest
            for column in shard.ragged.values():
                assert (column.starts >= 0).all()
                assert (column.lengths >= 0).all()
                assert (column.starts + column.lengths <= len(column.memory)).all()
            shard.close()
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_check_finds_a_flipped_bit_in_every_file(tmp_path: Path, kind: str) -> None:
    with opened(tmp_path, KINDS[kind]) as cache:
        add(cache, 1)
        layout = cache.layout
    assert check(tmp_path) == []
    for path in shard_files(layout, 1, KINDS[kind].cache_format):
        whole = path.read_bytes()
        data = bytearray(whole)
        data[-5] ^= 4
        path.write_bytes(data)
        assert {(found.shard, found.severity) for found in check(tmp_path)} == {(1, "error")}
        path.write_bytes(whole)
    assert check(tmp_path) == []


@each_format
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_samples_come_back(cache_format: str, data: st.DataObject) -> None:
    import tempfile

    fields, sizes = [], st.one_of(st.none(), st.integers(0, 3))
    for i in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(["|b1", "<f2", "<i8", "<c8", "bytes", "str"]))
        dims = data.draw(st.lists(sizes, max_size=3)) if dtype[0] in "|<" else ()
        fields.append(Field(f"f{i}", dtype, tuple(dims)))
    schema = Schema(tuple(fields))
    samples = [
        {f.name: _value(data, f) for f in fields} for _ in range(data.draw(st.integers(1, 4)))
    ]
    with tempfile.TemporaryDirectory() as name:
        facts = put(Path(name), cache_format, schema, samples)
        shard = reopened(Path(name), cache_format, schema, len(samples))
        assert all(map(equal, shard, samples))
        assert shard.digest() == facts.digest
        shard.close()


def _value(data: st.DataObject, field: Field) -> Any:
    if field.is_blob:
        return data.draw(st.binary() if field.dtype == "bytes" else st.text(_characters))
    shape = [data.draw(st.integers(0, 3)) if s is None else s for s in field.shape]
    return data.draw(hnp.arrays(field.dtype, tuple(shape)))


_characters = st.characters(exclude_categories=["Cs"])


@each_format
def test_large_values_are_not_copied(cache_format: str) -> None:
    schema, samples = CASES["large values"]
    files = CACHE_FORMATS[cache_format].encode(schema, samples)
    buffers = [b for file in files for b in file.pieces if isinstance(b, np.ndarray)]
    for sample in samples:
        if sample["x"].size:
            assert any(np.shares_memory(buffer, sample["x"]) for buffer in buffers)


@each_format
@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"x": np.zeros((2, 5), "<f4"), "note": ""}, r"expected x: float32\[\?, 3\], found"),
        ({"x": np.zeros((2, 3), "<f8"), "note": ""}, r"found float64\[2, 3\]"),
        ({"x": np.zeros((2, 3), "<f4"), "note": b""}, "expected note: str, found bytes"),
        ({"x": np.zeros((2, 3), "<f4")}, "expected note: str, found nothing"),
    ],
)
def test_samples_of_another_schema_are_refused(
    cache_format: str, sample: Sample, expected: str
) -> None:
    schema = declared(Field("x", "<f4", (None, 3)), Field("note", "str", ()))
    with pytest.raises(FormatError, match=expected):
        CACHE_FORMATS[cache_format].encode(schema, [sample])


@each_format
def test_a_name_that_is_no_text_is_refused(cache_format: str) -> None:
    for shape in ((2,), (None,)):
        with pytest.raises(FormatError, match="Unicode"):
            CACHE_FORMATS[cache_format].record_bytes(
                Schema((Field("\ud800", "<f4", shape),)), 8
            )


def test_a_field_with_the_name_of_anothers_shape_is_refused() -> None:
    schema = declared(Field("x", "<f4", (None, None)), Field("x/shape", "<f4", ()))
    with pytest.raises(FormatError, match="needs the name 'x/shape'"):
        CACHE_FORMATS["tfrecord"].record_bytes(schema, 8)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../../x", "..", ".", "a/b", "\0", "x.offsets", "C:\\x", "a\nb", "~"],
)
def test_no_field_leaves_its_directory(tmp_path: Path, name: str) -> None:
    (suffix,) = npy.suffixes(Schema.from_sample({name: np.zeros(2)}))
    file = suffix.removeprefix(".npy/")
    assert "/" not in file
    assert "\0" not in file
    assert not file.startswith(".")
    assert file.count(".") == 1
    schema, samples = fixed(name, np.arange(3))
    put(tmp_path, "npy", schema, samples)
    (path,) = shard_files(CacheLayout(tmp_path), 1, "npy")
    assert path.parent == CacheLayout(tmp_path).shard(1, ".npy")


def test_a_name_too_long_for_a_file_is_refused() -> None:
    npy.suffixes(Schema((Field("x" * 243, "<f4", ()),)))
    for name in ("x" * 244, "ä" * 41):
        with pytest.raises(FormatError, match="too long for a file"):
            npy.record_bytes(Schema((Field(name, "<f4", ()),)), 4)


@each_case
def test_numpy_loads_the_files(tmp_path: Path, case: Case) -> None:
    schema, samples = conformed(case)
    put(tmp_path, "npy", schema, samples)
    for field in schema.fields:
        stem = CacheLayout(tmp_path).shard(1, f".npy/{npy.file_stem(field)}")
        loaded = _load(stem, ".npy")
        if not field.is_ragged:
            np.testing.assert_array_equal(loaded, np.stack([s[field.name] for s in samples]))
            continue
        edges = _load(stem, ".offsets.npy").tolist()
        for i, (start, stop) in enumerate(itertools.pairwise(edges)):
            value, expected = loaded[start:stop], samples[i][field.name]
            if field.is_blob:
                assert bytes(value) == (expected.encode() if field.dtype == "str" else expected)
            else:
                np.testing.assert_array_equal(value.reshape(expected.shape), expected)
        if stem.with_name(stem.name + ".shapes.npy").exists():
            shapes = [list(sample[field.name].shape) for sample in samples]
            assert _load(stem, ".shapes.npy").tolist() == shapes


def _load(stem: Path, end: str) -> Any:
    path = stem.with_name(stem.name + end)
    found = np.load(path, mmap_mode="r" if np.load(path).size else None)
    return np.array(found)


def test_a_header_that_claims_more_than_there_is_is_refused(tmp_path: Path) -> None:
    from growcache.cache.formats.encoding import integer_table, npy_header

    schema, samples = ragged("<f4", (None, 3))
    put(tmp_path, "npy", schema, samples)
    directory = CacheLayout(tmp_path).shard(1, ".npy")
    huge = 2**60
    (directory / "x.npy").write_bytes(npy_header("<f4", (huge, 3)) + bytes(24))
    (directory / "x.offsets.npy").write_bytes(
        b"".join(integer_table(np.array([0] * N + [huge], np.int64)))
    )
    with pytest.raises(CorruptShardError, match="found 152 bytes that do not match"):
        reopened(tmp_path, "npy", schema, N)


TAMPERED: list[Callable[[np.ndarray[Any, Any]], object]] = [
    lambda t: t.__setitem__((3, 1), 2**62),  # a value's start
    lambda t: t.__setitem__((3, 1), -1),
    lambda t: t.__setitem__((3, 2), -5),  # a size
    lambda t: t.__setitem__((3, 2), 2**62),
    lambda t: t.__setitem__((3, slice(2, 4)), 2**32),
    lambda t: t.__setitem__((0, 0), 8),  # a record's end
    lambda t: t.__setitem__((3, 0), t[2, 0]),
    lambda t: t.__setitem__((3, 0), 2**62),
    lambda t: t.__setitem__((3, 0), -(2**63)),
]


@pytest.mark.parametrize("tamper", TAMPERED)
def test_offsets_that_point_elsewhere_are_refused(
    tmp_path: Path, tamper: Callable[[np.ndarray[Any, Any]], object]
) -> None:
    schema, samples = ragged("<i2", (None, 2, None))
    put(tmp_path, "tfrecord", schema, samples)
    path = CacheLayout(tmp_path).shard(1, ".offsets.npy")
    table = np.load(path)
    tamper(table)
    path.write_bytes(path.read_bytes()[: -table.nbytes] + table.tobytes())
    with pytest.raises(CorruptShardError, match="the values are not"):
        reopened(tmp_path, "tfrecord", schema, N)


@pytest.mark.parametrize(
    "shape", [(3, 3, 3), (-1, 2, -3), (2**62, 2, 0), (3, 2, 2**62), (0, 2, 2**61)]
)
def test_shapes_that_are_not_the_values_are_refused(tmp_path: Path, shape: Any) -> None:
    schema, samples = ragged("<i2", (None, 2, None))
    put(tmp_path, "npy", schema, samples)
    path = CacheLayout(tmp_path).shard(1, ".npy/x.shapes.npy")
    table = np.load(path)
    table[3] = shape
    path.write_bytes(path.read_bytes()[: -table.nbytes] + table.tobytes())
    with pytest.raises(CorruptShardError, match="the values are not"):
        reopened(tmp_path, "npy", schema, N)


READ_WITH_TENSORFLOW = """
import pickle, sys
import tensorflow as tf
names, shapes = sys.argv[2].split("|"), [name for name in sys.argv[3].split("|") if name]
features = {name: tf.io.FixedLenFeature([], tf.string) for name in names}
features |= {name: tf.io.VarLenFeature(tf.int64) for name in shapes}
rows = []
for record in tf.data.TFRecordDataset(sys.argv[1]):
    example = tf.io.parse_single_example(record, features)
    rows.append({name: example[name].numpy() for name in names})
    rows[-1] |= {name: example[name].values.numpy().tolist() for name in shapes}
pickle.dump(rows, open(sys.argv[4], "wb"))
"""

READ_WITH_THE_PACKAGE = """
import pickle, sys
from tfrecord.reader import tfrecord_loader
names, shapes = sys.argv[2].split("|"), [name for name in sys.argv[3].split("|") if name]
wanted = dict.fromkeys(names, "byte") | dict.fromkeys(shapes, "int")
rows = [
    {name: bytes(row[name]) if name in names else row[name].tolist() for name in row}
    for row in tfrecord_loader(sys.argv[1], None, wanted)
]
pickle.dump(rows, open(sys.argv[4], "wb"))
"""


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("program", "package"),
    [
        pytest.param(READ_WITH_TENSORFLOW, "tensorflow", marks=pytest.mark.slow),
        (READ_WITH_THE_PACKAGE, "tfrecord"),
    ],
    ids=["tensorflow", "tfrecord"],
)
def test_other_readers_read_ragged_records(tmp_path: Path, program: str, package: str) -> None:
    import pickle

    schema = KINDS["tfrecord-ragged"].schema
    samples = samples_of(4, N, schema)
    put(tmp_path, "tfrecord", schema, samples)
    out = tmp_path / "rows"
    arguments = [
        str(CacheLayout(tmp_path).shard(1)),
        "|".join(schema.names),
        "z/shape",
        str(out),
    ]
    subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    rows = pickle.loads(out.read_bytes())  # written by the line above
    assert len(rows) == N
    for row, sample in zip(rows, samples, strict=True):
        assert row["note"].decode() == sample["note"]
        assert row["data"] == sample["data"]
        assert row["x"] == sample["x"].tobytes()
        assert row["z"] == sample["z"].tobytes()
        assert row["z/shape"] == list(sample["z"].shape)


def test_files_of_one_format_do_not_hide_another(tmp_path: Path) -> None:
    """What is removed of a shard is everything that any format could have left."""
    layout = CacheLayout(tmp_path)
    adopt(layout)
    for kind in KINDS.values():
        put(tmp_path, kind.cache_format, kind.schema, samples_of(1, 3, kind.schema))
    layout.sidecar(1).write_bytes(b"{}")
    assert len(list(layout.shards.iterdir())) == 4
    remove_shard(layout, 1)
    assert not list(layout.shards.iterdir())
    assert not list(layout.incoming.iterdir())


def test_a_sidecar_of_one_file_of_records_needs_no_list_of_files() -> None:
    """As those of earlier versions were."""
    kind: Identity = KINDS["tfrecord-fixed"]
    facts = encode_shard("tfrecord", kind.schema, samples_of(0, 2)).facts
    origins = make(0, 2, identity=kind)[0].origins
    sidecar = Sidecar("f", 0, 0, 0, 0, parts=2, origins=origins, **facts)
    del facts["files"]
    assert Sidecar("f", 0, 0, 0, 0, parts=2, origins=origins, **facts) == sidecar
    assert [file.suffix for file in sidecar.files] == [RECORDS]
    assert Sidecar.from_bytes(sidecar.to_bytes()) == sidecar
