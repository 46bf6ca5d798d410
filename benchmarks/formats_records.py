"""Formats of rows, lines and records for benchmarks/formats.py, and how they are read by hand.

A file does not say where its lines, records or archive members start. A hand-written reader that
reads them at random must first read the whole file once to build an index; here it gets that
index for free. For LMDB it downloads each file once, as a whole.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.formats_samples import CHANNELS, ROWS, Take, ranges, values

GROUP = 64  # samples in a Parquet row group
LINES = (8_000, 24_000)  # bytes in a line: minimum and maximum
MEMBER = 17 << 10  # bytes of an archive's sample: header, .npy of 16.1 KiB, padding
LABELLED = MEMBER + (1 << 10)  # the same with the label and its header


def make_jsonl(path: Path, rng: np.random.Generator, samples: int) -> int:
    ends = line_ends()[:samples]
    letters = rng.integers(97, 123, ends[-1], np.uint8)
    letters[ends - 3], letters[ends - 2], letters[ends - 1] = (*b'"}\n',)
    for number, start in enumerate([0, *ends[:-1]]):
        head = b'{"label": %4d, "text": "' % number
        letters[start : start + len(head)] = np.frombuffer(head, np.uint8)
    return path.write_bytes(letters.tobytes())


@cache
def line_ends() -> Any:
    """Return the offsets of line ends, the same in every object and more than any object needs."""
    return np.random.default_rng(1).integers(*LINES, 1 << 16).cumsum()


def jsonl_by_hand(files: Any) -> Take:
    def take(key: str, number: int) -> Any:
        ends = line_ends()
        start = int(ends[number - 1]) if number else 0
        return json.loads(ranges(files, key, start, int(ends[number]) - start))

    return take


def make_tar(path: Path, rng: np.random.Generator, samples: int) -> int:
    with tarfile.open(path, "w") as archive:
        for number, rows in enumerate(values(rng, samples).reshape(samples, ROWS, CHANNELS)):
            array = io.BytesIO()
            np.save(array, rows)
            for name, data in (("npy", array.getvalue()), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{number:06d}.{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return samples * LABELLED


def tar_by_hand(files: Any) -> Take:
    def take(key: str, number: int) -> Any:
        data = ranges(files, key, number * LABELLED, LABELLED)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            array, label = (archive.extractfile(member) for member in archive)
            assert array is not None
            assert label is not None
            return np.load(io.BytesIO(array.read())), int(label.read())

    return take


def make_tfrecord(path: Path, rng: np.random.Generator, samples: int) -> int:
    from tfrecord import TFRecordWriter

    writer = TFRecordWriter(str(path))
    for number, rows in enumerate(values(rng, samples).reshape(samples, ROWS, CHANNELS)):
        # Labels have at most two digits, so that all records have the same length.
        writer.write({"x": (rows.tobytes(), "byte"), "label": (number % 100, "int")})
    writer.close()
    return path.stat().st_size


def tfrecord_by_hand(files: Any) -> Take:
    from tfrecord import example_pb2

    @cache
    def nbytes(key: str) -> int:
        head = ranges(files, key, 0, 8)
        return int.from_bytes(head, "little") + 16

    def take(key: str, number: int) -> Any:
        data = ranges(files, key, number * nbytes(key), nbytes(key))
        example = example_pb2.Example()
        example.ParseFromString(data[12:-4])
        features = example.features.feature
        rows = np.frombuffer(features["x"].bytes_list.value[0], "<f4")
        return rows.reshape(ROWS, CHANNELS), features["label"].int64_list.value[0]

    return take


def make_lmdb(path: Path, rng: np.random.Generator, samples: int) -> int:
    import lmdb

    with (
        lmdb.open(str(path), subdir=False, map_size=1 << 28, lock=False) as env,
        env.begin(write=True) as txn,
    ):
        for number, rows in enumerate(values(rng, samples).reshape(samples, ROWS, CHANNELS)):
            txn.put(b"%06d" % number, pickle.dumps(rows))
        pages = txn.stat()
    return int(pages["psize"] * (pages["leaf_pages"] + pages["overflow_pages"]))


def lmdb_by_hand(files: Any) -> Take:
    import lmdb

    once = threading.Lock()

    @cache
    def environment(key: str) -> Any:
        copy = f"{tempfile.gettempdir()}/{Path(key).name}"
        files.get_file(key, copy)
        return lmdb.open(copy, subdir=False, readonly=True, lock=False, max_spare_txns=64)

    def take(key: str, number: int) -> Any:
        with once:  # because several threads would otherwise download the same file
            opened = environment(key)
        with opened.begin() as txn:
            return pickle.loads(txn.get(b"%06d" % number))

    return take


def make_parquet(path: Path, rng: np.random.Generator, samples: int) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.list_(pa.float32(), ROWS * CHANNELS)
    column = pa.FixedSizeListArray.from_arrays(values(rng, samples).reshape(-1), type=kind)
    more = pa.array(rng.random(samples))
    table = pa.table({"x": column, "more": more})
    pq.write_table(table, path, row_group_size=GROUP, use_dictionary=False)
    groups = pq.ParquetFile(path).metadata
    wanted = [groups.row_group(i).column(0) for i in range(groups.num_row_groups)]
    return sum(column.total_compressed_size for column in wanted)


def parquet_by_hand(files: Any) -> Take:
    import pyarrow.parquet as pq

    @cache
    def table(_thread: int, key: str) -> Any:
        return pq.ParquetFile(files.open(key, cache_type="none"), pre_buffer=True)

    def take(key: str, number: int) -> Any:
        opened = table(threading.get_ident(), key)
        group = opened.read_row_group(number // GROUP, columns=["x"])
        return group["x"][number % GROUP].values.to_numpy()

    return take
