"""Small objects that decode to huge ones become holes, and the good objects are still delivered."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.accidents.commands import running, status, write_config
from tests.formats import lmdb_built as lmdb

GOOD = 6
MOST_MEMORY = 900 << 20  # per process; one visit may decode a few hundred MB
SECONDS = 200  # five times the duration of one format on a slow machine
Objects = dict[str, bytes]
PAGE = 512
BEYOND = 700  # MB, above the limit on one decompressed object


def framed(record: bytes, length: int | None = None) -> bytes:
    """Return a TFRecord; its header may claim another length, with a valid checksum."""
    head = struct.pack("<Q", len(record) if length is None else length)
    return head + checksum(head) + record + checksum(record)


def checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecords() -> tuple[str, dict[str, Any], Objects, Objects]:
    good = {
        f"good{n}": b"".join(framed(b"%d-%d" % (n, i)) for i in range(4)) for n in range(GOOD)
    }
    bombs = {
        "claims 2^63": framed(b"x" * 50, 1 << 63),
        "claims 2^40": framed(b"x" * 50, 1 << 40),
        "claims all but one byte": framed(b"x" * 50, 60),
        "wraps around": framed(b"x" * 50, (1 << 64) - 16),
        "a length of zeros": b"\0" * 200_000,
    }
    return "tfrecord", {"decode": "none"}, good, bombs


def packed_tfrecords() -> tuple[str, dict[str, Any], Objects, Objects]:
    form, options, good, _ = tfrecords()
    nothing = framed(b"") * 4000
    bombs = {
        "gigabytes of one record": zeros(framed(b"", 3 << 30)[:12], BEYOND),
        "gigabytes of nothing": zeros(b"", BEYOND),
        "very many empty records": packed(nothing, 10),
    }
    good = {name: gzip.compress(data) for name, data in good.items()}
    return form, {**options, "compression": "gzip"}, good, bombs


def zeros(head: bytes, megabytes: int) -> bytes:
    return packed(b"\0" * (1 << 20), megabytes, head)


def packed(block: bytes, times: int, head: bytes = b"") -> bytes:
    """Compress a header and then a block `times` times."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    pieces = [packer.compress(head), *(packer.compress(block) for _ in range(times))]
    return b"".join([*pieces, packer.flush()])


def lmdbs() -> tuple[str, dict[str, Any], Objects, Objects]:
    nodes = [(0, b"key%02d" % n, b"value%d" % n) for n in range(6)]
    leaf = lmdb.leaf(2, PAGE, nodes)
    good = {f"good{n}": database(leaf, 1, len(nodes)) for n in range(GOOD)}
    huge = (1 << 31) - 1
    bombs = {
        "a branch of itself": database(loop(2, 2), 60, 1 << 60),
        "two branches of one another": database(loop(2, 3) + loop(3, 2), 64, 1 << 40),
        "as deep as can be": database(loop(2, 2), 65535, 1 << 62),
        "a fan of itself": database(fan(2), 12, 1 << 50),
        "a value of 2 GB": database(large_value(huge), 1, 1),
        "a value beyond the end": database(lmdb.leaf(2, PAGE, [(1, b"k", struct.pack("<Q", 1 << 40))]), 1, 1),
        "2^60 entries": database(leaf, 1, 1 << 60),
        "a root far away": lmdb.meta(0, PAGE, lmdb.tree(1 << 50, 3, 9))
        + lmdb.meta(1, PAGE, lmdb.tree(1 << 50, 3, 9), 2)
        + leaf,
    }  # fmt: skip
    return "lmdb", {"key": "str"}, good, bombs


def database(pages: bytes, depth: int, entries: int) -> bytes:
    top = lmdb.tree(2, depth, entries)
    return lmdb.meta(0, PAGE, top) + lmdb.meta(1, PAGE, top, 2) + pages


def loop(number: int, to: int) -> bytes:
    return lmdb.branch(number, PAGE, [(b"", to), (b"m", to)])


def fan(number: int) -> bytes:
    """A page with 20 children that are all the page itself."""
    return lmdb.branch(number, PAGE, [(b"%c" % (97 + n), number) for n in range(20)])


def large_value(claimed: int) -> bytes:
    leaf = lmdb.leaf(2, PAGE, [(1, b"k", struct.pack("<Q", 3))], large=claimed)
    return leaf + lmdb.overflow(3, PAGE, b"v" * 100)


def npzs() -> tuple[str, dict[str, Any], Objects, Objects]:
    good = {f"good{n}": archive(np.full((3, 4), n, "<f4")) for n in range(GOOD)}
    bombs = {
        "a GB of zeros": zipped(npy_head((1050 << 20,), "|u1"), 1050),
        "says less than it has": lying(zipped(npy_head((200 << 20,), "|u1"), 200)),
        "a header of 2^57 values": archive_of(npy_head((1 << 57,), "|u1") + b"1234"),
    }
    return "npz", {}, good, bombs


def archive(values: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, x=values)
    return file.getvalue()


def npy_head(shape: tuple[int, ...], dtype: str) -> bytes:
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    text = text.ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text


def archive_of(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("x.npy", data)
    return file.getvalue()


def zipped(head: bytes, megabytes: int) -> bytes:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as opened,
        opened.open("x.npy", "w", force_zip64=True) as member,
    ):
        member.write(head)
        for _ in range(megabytes):
            member.write(b"\0" * (1 << 20))
    return file.getvalue()


def lying(data: bytes) -> bytes:
    """Make the directory claim 1000 bytes for the member."""
    at = data.rindex(b"PK\1\2")
    return data[: at + 24] + struct.pack("<I", 1000) + data[at + 28 :]


def tars() -> tuple[str, dict[str, Any], Objects, Objects]:
    good = {f"good{n}": gzip.compress(tarred({f"{n}.txt": b"hello"})) for n in range(GOOD)}
    claim = tarfile.TarInfo("a.txt")
    claim.size = 1 << 40
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 1 << 30
    bombs = {
        "gigabytes of zeros": zeros(b"", BEYOND),
        "a member of a terabyte": gzip.compress(claim.tobuf() + b"\0" * 1024),
        "a member of gigabytes": zeros(size_of("b.txt", 3 << 30), BEYOND),
        "a name of a gigabyte": zeros(name.tobuf(), BEYOND),
    }
    return "tar", {"compression": "gzip"}, good, bombs


def size_of(name: str, nbytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = nbytes
    return member.tobuf()


def tarred(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as opened:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            opened.addfile(member, io.BytesIO(data))
    return file.getvalue()


def jsonls() -> tuple[str, dict[str, Any], Objects, Objects]:
    line = b'{"text": "%d"}\n'
    good = {f"good{n}": gzip.compress(line % n) for n in range(GOOD)}
    bombs = {
        "one line of gigabytes": packed(b" " * (1 << 20), BEYOND, b'{"text": "'),
        "nested without end": gzip.compress(b'{"text": ' + b"[" * 5_000_000 + b"\n"),
        "streams of streams": b"".join(zeros(b"", 64) for _ in range(40)),
    }
    return "jsonl", {"compression": "gzip"}, good, bombs


def parquets() -> tuple[str, dict[str, Any], Objects, Objects]:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")

    def table(values: Any, **more: Any) -> bytes:
        file = io.BytesIO()
        pq.write_table(pa.table({"x": values}), file, **more)
        return file.getvalue()

    good = {f"good{n}": table(pa.array([f"{n}-{i}" for i in range(4)])) for n in range(GOOD)}
    text = pa.array(["x" * 1_000_000])
    many = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), text)
    whole = good["good0"]
    bombs = {
        "20 GB of one long value": table(many),
        "a footer of 2 GB": whole[:-8] + struct.pack("<I", 2_000_000_000) + b"PAR1",
        "a column of zeros": table(pa.array(["\0" * 300_000_000]), compression="zstd"),
    }
    return "parquet", {}, good, bombs


def hdf5s() -> tuple[str, dict[str, Any], Objects, Objects]:
    h5py = pytest.importorskip("h5py")

    def written(**settings: Any) -> bytes:
        file = io.BytesIO()
        with h5py.File(file, "w") as opened:
            made = opened.create_dataset("x", **settings)
            if "data" not in settings:
                made[0, :10] = 1.0
        return file.getvalue()

    def cut(filters: dict[str, Any]) -> bytes:
        """Store a chunk that is far shorter than its filter promises."""
        file = io.BytesIO()
        with h5py.File(file, "w") as opened:
            made = opened.create_dataset("x", (64, 4), "<f4", chunks=(64, 4), **filters)
            made.id.write_direct_chunk((0, 0), b"\xff" * 7)
        return file.getvalue()

    values = np.arange(256, dtype="<f4").reshape(64, 4)
    good = {f"good{n}": written(data=values + n, chunks=(16, 4)) for n in range(GOOD)}
    bombs = {
        "a chunk of 1.2 GB": zeros_in_a_chunk((64, 4_700_000)),
        "lzf of nothing": cut({"compression": "lzf"}),
        "scale-offset of nothing": cut({"scaleoffset": 2}),
        "szip of nothing": cut({"compression": "szip"}),
        "never written": written(shape=(1 << 50, 4), dtype="<f4", chunks=(16, 4)),
    }
    return "hdf5", {"window": 64}, good, bombs


def zeros_in_a_chunk(shape: tuple[int, int]) -> bytes:
    """Return a file whose only chunk is tiny and decodes to a huge array."""
    h5py = pytest.importorskip("h5py")
    packer = zlib.compressobj(9)
    pieces = [packer.compress(b"\0" * (4 * shape[1])) for _ in range(shape[0])]
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        made = opened.create_dataset("x", shape, "<f4", chunks=shape, compression="gzip")
        made.id.write_direct_chunk((0, 0), b"".join([*pieces, packer.flush()]))
    return file.getvalue()


def images() -> tuple[str, dict[str, Any], Objects, Objects]:
    image = pytest.importorskip("PIL.Image")

    def png(size: tuple[int, int]) -> bytes:
        file = io.BytesIO()
        image.new("RGB", size, (1, 2, 3)).save(file, "PNG")
        return file.getvalue()

    def piece(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    good = {f"good{n}": png((8, 8)) for n in range(GOOD)}
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    mark = b"\x89PNG\r\n\x1a\n"
    note = b"a\0\0" + zlib.compress(b"\0" * 200_000_000, 9)
    small = good["good0"]
    bombs = {
        "3.6 billion pixels": mark + piece(b"IHDR", head) + piece(b"IDAT", b"x"),
        "a note of 200 MB": small[:33] + piece(b"zTXt", note) + small[33:],
        "a piece of 2 GB": small[:33] + struct.pack(">I", 0x7FFFFFFF) + b"IDAT",
    }
    return "image", {"decode": True, "label": "none"}, good, bombs


MAKERS: dict[str, Callable[[], tuple[str, dict[str, Any], Objects, Objects]]] = {
    "lmdb": lmdbs,
    "tfrecord": tfrecords,
    "tfrecord, gzip": packed_tfrecords,
    "npz": npzs,
    "tar, gzip": tars,
    "jsonl, gzip": jsonls,
    "parquet": parquets,
    "hdf5": hdf5s,
    "image": images,
}
SLOW = [name for name in MAKERS if name not in ("tfrecord",)]


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """Record the peak memory of any one process in a process tree."""
    peaks, ended = [0], threading.Event()

    def look(one: int) -> None:
        for line in Path(f"/proc/{one}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                peaks[0] = max(peaks[0], 1024 * int(line.split()[1]))
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            for child in children.read_text().split():
                look(int(child))

    def watch() -> None:
        while not ended.wait(0.02):
            try:
                look(pid)
            except OSError:  # a process has just ended
                continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MAKERS],
)
def test_bombs_are_holes_and_good_objects_come(tmp_path: Path, name: str) -> None:
    form, options, good, bombs = MAKERS[name]()
    objects = tmp_path / "objects"
    objects.mkdir()
    for number, (key, data) in enumerate({**good, **bombs}.items()):
        (objects / f"{number:02d} {key.replace(' ', '_')}").write_bytes(data)
    config = write_config(
        tmp_path / "cache.yaml",
        {"url": f"{objects}/*", "format": form, "options": options},
        sampling={"max_skipped": 1.0, "timeout_seconds": 60},
        cache={"max_bytes": "200MB", "min_uses": 0},
    )
    with running(config, "--until-full") as service:
        with watched(service.process.pid) as peaks:
            deadline = time.monotonic() + SECONDS
            while service.alive:
                assert time.monotonic() < deadline, (name, service.errors)
                time.sleep(0.02)
        assert service.process.returncode == 0, service.errors
    found = status(tmp_path / "cache")
    assert found["samples"] >= GOOD, found
    assert found["failures"] == 0, found
    assert peaks[0] < MOST_MEMORY, (name, peaks[0] >> 20)
    holes = reasons(tmp_path / "cache")
    kept = keys(tmp_path / "cache")
    bad = {f"{len(good) + n:02d} {key.replace(' ', '_')}" for n, key in enumerate(bombs)}
    assert {key for key in kept if key not in bad} == {
        f"{n:02d} {k}" for n, k in enumerate(good)
    }
    for key in bad - kept:  # an unreadable bomb is a hole with a reason
        assert len(holes.get(key, "")) > 20, (key, holes)


def sidecars(cache: Path) -> Iterator[dict[str, Any]]:
    for file in (cache / "shards").glob("*.json"):
        yield json.loads(file.read_text())


def reasons(cache: Path) -> dict[str, str]:
    """Return the reason of every hole by object name, from the sidecars."""
    said = (one for outer in sidecars(cache) for one in (outer, *outer.values()))
    inner = [one for one in said if isinstance(one, dict) and "holes" in one]
    assert inner
    return {Path(key).name: why for one in inner for key, _, why, *_ in one["holes"]}


def keys(cache: Path) -> set[str]:
    import growcache

    with growcache.Snapshot.take(cache) as snapshot:
        return {Path(snapshot.origin(i).key).name for i in range(len(snapshot))}
