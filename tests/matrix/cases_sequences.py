"""SequenceExamples of TensorFlow, archives of WebDataset, LMDB, recordings read by MNE, records of NumPy."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values
from tests.matrix.cases_science import write_bdf

# --- TensorFlow

CONTEXT = {"label": "int64", "name": "str"}


def _feature(value: Any) -> Any:
    tf = import_module("tensorflow")
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    if value.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))


def write_sequences(folder: Path, kind: str) -> None:
    tf, rng = import_module("tensorflow"), np.random.default_rng(0)
    for file in range(2):
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord")) as writer:
            for i in range(6):
                k = i + 1
                steps = {
                    "even": list(rng.random((k, 3), np.float32)),
                    "uneven": [rng.integers(0, 9, n) for n in (0, *rng.integers(1, 4, k), 7)],
                    "frames": [rng.bytes(int(n)) for n in rng.integers(1, 9, k)],
                    "codes": [rng.bytes(8) for _ in range(k)],
                    "words": [b"w%d" % n for n in range(k)],
                }[kind]
                example = tf.train.SequenceExample()
                example.context.feature["label"].CopyFrom(_feature(np.array([i])))
                example.feature_lists.feature_list[kind].feature.extend(map(_feature, steps))
                writer.write(example.SerializeToString())


def by_tensorflow(place: Place, kind: str, how: Any) -> Values:
    tf = import_module("tensorflow")
    framed = place.path.with_suffix(".one")
    framed.write_bytes(place.path.read_bytes()[place.start : place.stop])
    record = next(iter(tf.data.TFRecordDataset(str(framed))))
    framed.unlink()
    context, lists = tf.io.parse_single_sequence_example(
        record, {"label": tf.io.FixedLenFeature([], tf.int64)}, {kind: how(tf)}
    )
    return {"label": np.int64(context["label"]), **_fields(kind, lists[kind])}


def _fields(kind: str, found: Any) -> Values:
    if kind == "uneven":
        return {"uneven": found.values.numpy(), "uneven_steps": found.row_lengths().numpy()}
    values = found.numpy()
    if kind == "even":
        return {"even": values}
    if kind == "codes":
        return {"codes": np.array([list(code) for code in values], np.uint8)}
    if kind == "words":
        return {"words": json.dumps([word.decode() for word in values], separators=(",", ":"))}
    lengths = np.array([len(frame) for frame in values], np.int64)
    return {"frames": np.frombuffer(b"".join(values), np.uint8), "frames_steps": lengths}


def _bytes_of(tf: Any) -> Any:
    return tf.io.FixedLenSequenceFeature([], tf.string)


def _sequence(kind: str, how: Callable[[Any], Any], **features: Any) -> Case:
    options = {"features": {"label": "int64", **features}} if features else {}
    return Case(
        "tf.io.TFRecordWriter",
        f"tf.train.SequenceExample, {kind}",
        "tfrecord",
        partial(write_sequences, kind=kind),
        partial(by_tensorflow, kind=kind, how=how),
        12,
        options,
        needs=("tensorflow",),
        url="*.tfrecord",
    )


SEQUENCES = [
    _sequence("even", lambda tf: tf.io.FixedLenSequenceFeature([3], tf.float32)),
    _sequence("even", lambda tf: tf.io.FixedLenSequenceFeature([3], tf.float32), even=["float32", None, 3]),
    _sequence("uneven", lambda tf: tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64)),
    _sequence("uneven", lambda tf: tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64), uneven=["int64", None, None]),
    _sequence("frames", _bytes_of),
    _sequence("codes", _bytes_of, codes=["uint8", None, 8]),
    _sequence("words", _bytes_of, words="str"),
]  # fmt: skip

# --- WebDataset


def write_shards(folder: Path, **settings: Any) -> None:
    wds, rng = import_module("webdataset"), np.random.default_rng(0)
    for file in range(2):
        end = ".gz" if settings.get("compress") else ""
        with wds.TarWriter(str(folder / f"{file}.tar{end}"), **settings) as sink:
            for i in range(6):
                sink.write(
                    {
                        "__key__": f"sub/{file}{i:03}",
                        "npy": rng.random((2, 3)).astype("f4"),
                        "cls": i,
                        "txt": f"é{i}",
                        "json": {"a": [1, i]},
                        "seg.bin": rng.bytes(i + 1),
                    }
                )


@functools.cache
def _shard(path: Path) -> dict[str, Any]:
    wds = import_module("webdataset")
    dataset = wds.WebDataset(str(path), shardshuffle=False, empty_check=False).decode()
    return {sample["__key__"]: sample for sample in dataset}


def by_webdataset(place: Place, fields: tuple[str, ...] = ()) -> Values:
    """The origin is the range of a sample's members in the (unpacked) archive."""
    data = place.path.read_bytes()
    if place.path.suffix == ".gz":
        data = import_module("gzip").decompress(data)
    members = io.BytesIO(data[place.start : place.stop] + bytes(1024))
    with tarfile.open(fileobj=members) as archive:
        key = archive.getnames()[0].partition(".")[0]
    sample = _shard(place.path)[key]
    found = {
        "__key__": key,
        "npy": sample["npy"],
        "cls": np.int64(sample["cls"]),
        "txt": sample["txt"],
        "json": json.dumps(sample["json"], separators=(",", ":")),
        "seg.bin": sample["seg.bin"],
    }
    return {name: found[name] for name in fields or found}


def _shards(
    holds: str, samples: int = 12, fields: tuple[str, ...] = (), **settings: Any
) -> Case:
    compress = bool(settings.get("compress"))
    return Case(
        "webdataset.TarWriter", holds, "tar", partial(write_shards, **settings), partial(by_webdataset, fields=fields), samples,
        {**({"fields": list(fields)} if fields else {}), **({"compression": "gzip"} if compress else {})},
        needs=("webdataset",),
    )  # fmt: skip


ARCHIVES = [
    _shards("arrays, classes, text, JSON, bytes"),
    _shards("some members", fields=("cls", "npy")),
    _shards("gzip", compress=True),
]

# --- LMDB


def write_lmdb(folder: Path, database: str | None = None, *, nbytes: int = 100) -> None:
    lmdb, rng = import_module("lmdb"), np.random.default_rng(0)
    for file in range(2):
        path = str(folder / f"{file}.lmdb")
        with lmdb.open(path, subdir=False, lock=False, map_size=1 << 24, max_dbs=2) as env:
            db = env.open_db(database.encode()) if database else None
            with env.begin(db=db, write=True) as txn:
                for i in range(20):
                    txn.put(f"{i:04}".encode(), rng.bytes(nbytes + 50 * i))


@functools.cache
def _lmdb_items(path: Path, database: str | None) -> dict[bytes, bytes]:
    lmdb = import_module("lmdb")
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True, max_dbs=2) as env:
        db = env.open_db(database.encode(), create=False) if database else None
        with env.begin(db=db) as txn:
            return {bytes(value): bytes(key) for key, value in txn.cursor()}


def by_lmdb(place: Place, database: str | None = None, *, key: bool = False) -> Values:
    node = place.path.read_bytes()[place.start : place.stop]  # of a small value with its key
    items = _lmdb_items(place.path, database).items()
    value, stored = next(item for item in items if item[0] in node)  # all values differ
    return {"data": value, **({"key": stored.decode()} if key else {})}


def _lmdb(holds: str, write: Any, read: Any, **options: Any) -> Case:
    return Case("lmdb", holds, "lmdb", write, read, 40, options, url="*.lmdb", needs=("lmdb",))


LMDB = [
    _lmdb("small values", write_lmdb, by_lmdb),
    _lmdb("small values and keys", write_lmdb, partial(by_lmdb, key=True), key="str"),
    _lmdb("values of several pages", partial(write_lmdb, nbytes=9000), by_lmdb),
    _lmdb("a named database", partial(write_lmdb, database="images"), partial(by_lmdb, database="images"), database="images"),
]  # fmt: skip

# --- MNE


def write_by_mne(folder: Path) -> None:
    mne, rng = import_module("mne"), np.random.default_rng(0)
    for i in range(2):
        info = mne.create_info(["Fz", "Cz", "Pz"], 100.0, "eeg")
        raw = mne.io.RawArray(rng.uniform(-5e-5, 5e-5, (3, 1000)), info, verbose="error")
        raw.export(folder / f"{i}.edf", physical_range=(-60, 60), verbose="error")


@functools.cache
def _recording(path: Path) -> Any:
    mne = import_module("mne")
    read = mne.io.read_raw_edf if path.suffix == ".edf" else mne.io.read_raw_bdf
    return read(path, preload=True, verbose="error").get_data(units="uV")


def by_mne(place: Place, channels: tuple[int, ...] | None = None) -> Values:
    values = _recording(place.path)[:, place.start : place.stop]
    chosen = values if channels is None else values[list(channels)]
    return {"x": chosen.astype("f4")}


def _mne(writer: str, write: Any, read: Any, samples: int, needs: str, **options: Any) -> Case:
    return Case(
        writer, "read by MNE", "edf", write, read, samples, options, needs=("mne", needs)
    )


RECORDINGS = [
    _mne("mne.io.Raw.export", write_by_mne, by_mne, 20, "edfio", window=100),
    _mne("mne.io.Raw.export", write_by_mne, by_mne, 38, "edfio", window=100, stride=50),
    _mne("mne.io.Raw.export", write_by_mne, partial(by_mne, channels=(2, 0)), 20, "edfio", window=100, channels=["Pz", "Fz"]),
    _mne("pyedflib", write_bdf, by_mne, 20, "pyedflib", window=100),
]  # fmt: skip

# --- NumPy

RECORD = np.dtype(
    [
        ("t", "<M8[ms]"),
        ("name", "<U4"),
        ("pose", [("x", ">f8"), ("q", "<f4", (4,))]),
        ("flag", "|b1"),
    ]
)


def write_records(folder: Path) -> None:
    for file in range(2):
        n = np.arange(10 * file, 10 * file + 10)
        found = np.zeros(10, RECORD)
        found["t"], found["name"], found["flag"] = n, [f"é{i}" for i in n], n % 2 == 0
        found["pose"]["x"], found["pose"]["q"] = n / 2, n[:, None] + np.arange(4)
        np.save(folder / f"{file}.npy", found)


def record(place: Place) -> Values:
    found = np.load(place.path)[place.start]
    return {
        "t": found["t"].astype("i8"),
        "name": str(found["name"]),
        "pose.x": found["pose"]["x"],
        "pose.q": found["pose"]["q"],
        "flag": found["flag"],
    }


def record_window(place: Place) -> Values:
    found = np.load(place.path)[place.start : place.stop]
    return {"t": found["t"].astype("i8"), "flag": found["flag"]}


def write_small_floats(folder: Path, name: str) -> None:
    dtype = getattr(import_module("ml_dtypes"), name)
    for i in range(2):
        np.save(folder / f"{i}.npy", np.linspace(-3, 3 + i, 24).reshape(4, 6).astype(dtype))


def small_floats(place: Place, name: str, wide: str) -> Values:
    dtype = getattr(import_module("ml_dtypes"), name)
    stored = np.load(place.path)[place.start]
    return {"x": stored.view(dtype).astype(wide)}


def _small(name: str, wide: str) -> Case:
    return Case(
        "numpy.save of ml_dtypes", name, "npy", partial(write_small_floats, name=name),
        partial(small_floats, name=name, wide=wide), 8, {"axis": 0, "dtype": name}, needs=("ml_dtypes",),
    )  # fmt: skip


RECORDS = [
    Case("numpy.save", "records", "npy", write_records, record, 20, {"axis": 0}),
    Case("numpy.save", "records", "npy", write_records, record_window, 10, {"window": 2, "fields": ["t", "flag"]}),
    _small("bfloat16", "f4"),
    _small("float8_e4m3fn", "f2"),
]  # fmt: skip
CASES = [*SEQUENCES, *ARCHIVES, *LMDB, *RECORDINGS, *RECORDS]
