"""How much memory a sampler takes on files that lie about their sizes, or unpack to far more than they are.

``python -m tests.security.hostile_memory [FORMAT …]`` prints the peak of a real sampler for each format. A family
is a few good objects, which say what a sample is, and bad ones: claims, bombs, and a good object with a few
bytes changed. Objects that truly hold hundreds of MB in few bytes, as empty masks do, are measured by
themselves (``large``): they are read where a cache has room for them.
"""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from growcache.usercode import child_environment
from tests.formats import (
    test_audio,
    test_dicom,
    test_edf,
    test_fits,
    test_nifti,
    test_tar,
    test_tfrecord,
    test_tiff,
)
from tests.sampling.services import write_config
from tests.security import test_hostile_containers as containers
from tests.security.test_hostile_objects import hostile as hostile_npy

MOST_MB = 200.0
BOMB_BYTES = 480_000_000
GOOD, CHANGED = 60, 40  # objects that are sound, and that have changed bytes
Objects = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Family:
    """Good and bad objects of a format."""

    form: str
    good: bytes
    bad: Callable[[], Objects]
    options: dict[str, Any] = field(default_factory=dict)
    ending: str = ""
    large: Callable[[], Objects] = dict  # objects that truly hold very much in few bytes


@dataclass(frozen=True, slots=True)
class Peak:
    """The memory of a sampler, MB, and how its run ended."""

    megabytes: float
    code: int
    said: str


def run_family(family: Family, folder: Path, *, large: bool = False) -> Peak:
    data = folder / "data"
    data.mkdir(parents=True)
    for number in range(GOOD):
        (data / f"good-{number:02d}{family.ending}").write_bytes(family.good)
    others = family.large() if large else {**family.bad(), **dict(changed(family.good))}
    for name, content in others.items():
        (data / f"{name}{family.ending}").write_bytes(content)
    config = write_config(
        folder / "c.yaml",
        f"{data}/*{family.ending}",
        source={"format": family.form, "options": family.options},
        sampling={"max_skipped": 0.99, "timeout_seconds": 60},
        cache={"max_bytes": "300MB"},
    )
    return peak_of_run(config, folder / "log")


def changed(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield copies with a few bytes of the first kilobytes changed, as a liar would."""
    rng = np.random.default_rng(0)
    for number in range(CHANGED):
        data = bytearray(good)
        for at in rng.integers(0, min(len(data), 2000), 1 + number % 4).tolist():
            data[at] = int(rng.choice([0xFF, 0x7F, 0, 1 << number % 8]))
        yield f"changed-{number:02d}", bytes(data)


def peak_of_run(config: Path, log: Path) -> Peak:
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "growcache", "run", str(config), "--until-full"],
            env=child_environment(),
            stdout=said,
            stderr=said,
        )
        most = 0
        while process.poll() is None:
            most = max([most, *map(peak_kib, samplers(process.pid))])
            time.sleep(0.01)
    return Peak(most * 1024 / 1e6, process.returncode, log.read_text(errors="replace")[-600:])


def samplers(pid: int) -> Iterator[int]:
    """Yield the samplers among the descendants of a process."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            try:
                if b"sampler" in Path(f"/proc/{child}/cmdline").read_bytes():
                    yield child
            except OSError:
                continue
            yield from samplers(child)


def peak_kib(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = text.partition("VmHWM:")[2].split(maxsplit=1)
    return int(found[0]) if found else 0


# --- bad objects


def zeros_gz(head: bytes = b"") -> bytes:
    return gzip.compress(head + bytes(BOMB_BYTES), 1, mtime=0)


def replaced(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def npz() -> Objects:
    """A member that unpacks to far more than its array."""
    small = containers.array(1)
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", small + bytes(BOMB_BYTES))
    return {"bomb": file.getvalue(), **containers.npzs()[1]}


def large_npz() -> Objects:
    np.savez_compressed(file := io.BytesIO(), x=np.zeros(BOMB_BYTES // 4, "f4"))
    return {"zeros": file.getvalue()}


def hdf5_of(shape: tuple[int, ...], chunks: tuple[int, ...], *, filled: bool = False) -> bytes:
    import h5py

    with h5py.File(file := io.BytesIO(), "w") as opened:
        made = opened.create_dataset("x", shape, "f8", chunks=chunks, compression="gzip")
        if filled:
            made[:] = 0
        else:
            packed = zlib.compress(bytes(BOMB_BYTES), 9)
            made.id.write_direct_chunk((0,) * len(shape), packed)
    return file.getvalue()


def hdf5() -> Objects:
    return {
        "claim": hdf5_of((1 << 40, 1 << 10), (1 << 10, 1 << 10)),
        "chunk": hdf5_of((1 << 30,), (1 << 28,)),
        "bomb": hdf5_of((1 << 16,), (1 << 16,)),
        **containers.hdf5s()[1],
    }


def large_hdf5() -> Objects:
    return {"zeros": hdf5_of((BOMB_BYTES // 8,), (BOMB_BYTES // 16,), filled=True)}


def large_parquet() -> Objects:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.array(np.zeros(BOMB_BYTES // 8, np.int64))
    pq.write_table(
        pa.table({"x": values}), file := io.BytesIO(), compression="zstd", use_dictionary=False,
        row_group_size=BOMB_BYTES // 8, data_page_size=BOMB_BYTES,
    )  # fmt: skip
    return {"zeros": file.getvalue()}


def lists_of_parquet() -> Objects:
    """Lists in which a few bytes stand for tens of millions of values, or of long texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def table(items: Any) -> bytes:
        bounds = pa.array([0, len(items)], pa.int32())
        lists = pa.ListArray.from_arrays(bounds, items)
        pq.write_table(pa.table({"x": lists}), file := io.BytesIO(), compression="zstd")
        return file.getvalue()

    numbers = pa.array(np.zeros(20_000_000, np.int64))
    return {
        "numbers": table(numbers),
        "structs": table(pa.StructArray.from_arrays([numbers], ["a"])),
        "texts": table(pa.array(["a" * 1000]).take(pa.array(np.zeros(200_000, np.int32)))),
    }


def large_image() -> Objects:
    from PIL import Image

    Image.new("L", (9450, 9450)).save(file := io.BytesIO(), "PNG")
    return {"black": file.getvalue()}


def image() -> Objects:
    claim = replaced(png(), 16, struct.pack(">II", 60_000, 60_000))
    return {"claim": claim, "most": replaced(claim, 16, struct.pack(">II", 9_000, 9_000))}


def png() -> bytes:
    from PIL import Image

    Image.new("RGB", (8, 6)).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def edf() -> Objects:
    good = test_edf.recording({"C3": 32}, 60)
    return {
        "signals": replaced(good, 252, b"9999"),
        "records": replaced(good, 236, b"99999999"),
        "large": replaced(good, 256 + 216 * 2, b"99999999"),
        "cut": replaced(good, 236, b"-1      ")[:-7],
    }


def fits() -> Objects:
    good = test_fits.image(np.arange(1 << 16, dtype="i2").reshape(256, 256))
    endless = b"SIMPLE  =                    T".ljust(80) + b"HISTORY x".ljust(80) * 50_000
    axis = good.rindex(b"NAXIS1")
    return {
        "claim": replaced(good, axis, b"NAXIS1  =           2000000000"),
        "negative": replaced(good, axis, b"NAXIS1  =          -2000000000"),
        "endless": endless,
    }


def dicom() -> Objects:
    import pydicom

    good = test_dicom.scan(np.arange(1 << 12, dtype="i2").reshape(64, 64))
    bad: Objects = {}
    for name, rows, frames in (("claim", 65535, 1), ("frames", 64, 99_999_999)):
        made = pydicom.dcmread(io.BytesIO(good))
        made.Rows = made.Columns = rows
        made.NumberOfFrames = frames
        pydicom.dcmwrite(file := io.BytesIO(), made)
        bad[name] = file.getvalue()
    made = pydicom.dcmread(io.BytesIO(good))
    made.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    made.PixelData = bytes(BOMB_BYTES)
    pydicom.dcmwrite(file := io.BytesIO(), made)
    return {**bad, "deflated": file.getvalue()}


def nifti() -> Objects:
    good = test_nifti.small()
    return {
        "claim": replaced(good, 40, struct.pack("<8h", 3, 32767, 32767, 32767, 1, 1, 1, 1)),
        "negative": replaced(good, 40, struct.pack("<8h", 3, -5, 5, 1, 1, 1, 1, 1)),
    }


def nifti_gz() -> Objects:
    good = test_nifti.small()
    claims = {name: gzip.compress(data, mtime=0) for name, data in nifti().items()}
    return {"bomb": zeros_gz(good), "zeros": zeros_gz(), **claims}


def audio() -> Objects:
    good = test_audio.audio()
    data = good.index(b"data")
    return {
        "claim": replaced(good, data + 4, b"\xf0\xff\xff\xff"),
        "channels": replaced(good, 22, b"\xff\xff"),
        "format": replaced(good, 16, b"\xff\xff\xff\x7f"),
    }


def flac() -> Objects:
    good = test_audio.audio(form="FLAC")
    claim = bytearray(good)
    claim[21] |= 0x0F
    claim[22:26] = b"\xff\xff\xff\xff"  # of 2^36 frames
    return {"claim": bytes(claim), "rate": replaced(good, 18, b"\xff\xff\xff")}


def tiff() -> Objects:
    good = test_tiff.ome()
    bomb = zlib.compress(bytes(BOMB_BYTES), 1)
    plain = bytearray(test_tiff.written(np.zeros((8, 8), "u2"), compression="zlib"))
    for tag, value in ((273, len(plain)), (279, len(bomb))):
        at = plain.index(tag.to_bytes(2, "little") + b"\x04\0\x01")
        plain[at + 8 : at + 12] = value.to_bytes(4, "little")
    large = bytearray(plain)
    for tag in (256, 257, 278):
        at = large.index(tag.to_bytes(2, "little") + b"\x04\0\x01")
        large[at + 8 : at + 12] = (60_000).to_bytes(4, "little")
    return {
        "claim": good.replace(b'SizeT="3"', b'SizeT="9"' + b"9" * 0),
        "bomb": bytes(plain) + bomb,
        "large": bytes(large) + bomb,
        "directories": directories(200_000),
        "loop": directories(1),
        "subifds": subdirectories(1 << 20),
        "strips": strips(1 << 22),
    }


def directory(entries: list[tuple[int, int, int, int]], following: int) -> bytes:
    tags = b"".join(struct.pack("<HHII", *one) for one in entries)
    return struct.pack("<H", len(entries)) + tags + struct.pack("<I", following)


ENTRIES = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8),
           (277, 3, 1, 1), (278, 4, 1, 8), (279, 4, 1, 64)]  # fmt: skip


def directories(count: int) -> bytes:
    size = len(directory(ENTRIES, 0))
    made = [directory(ENTRIES, 8 + size * (n + 1)) for n in range(count - 1)]
    last = directory(ENTRIES, 8 if count == 1 else 0)
    return b"II*\0\x08\0\0\0" + b"".join(made) + last


def subdirectories(count: int) -> bytes:
    """A directory that names so many others, which overlap."""
    size = len(directory([*ENTRIES, (330, 4, count, 0)], 0))
    at = 8 + size
    first = directory([*ENTRIES, (330, 4, count, at)], 0)
    inner = directory(ENTRIES, 0)
    where = [at + 4 * count + n % 1000 * len(inner) for n in range(count)]
    return b"II*\0\x08\0\0\0" + first + struct.pack(f"<{count}I", *where) + inner * 1000


def strips(count: int) -> bytes:
    entries = [one for one in ENTRIES if one[0] not in (257, 259, 273, 278, 279)]
    entries += [(257, 4, 1, count), (259, 3, 1, 8), (273, 4, count, 0), (278, 4, 1, 1), (279, 4, count, 0)]  # fmt: skip
    size = len(directory(entries, 0))
    at = {273: 8 + size, 279: 8 + size + 4 * count}
    entries = sorted((tag, kind, n, at.get(tag, value)) for tag, kind, n, value in entries)
    return b"II*\0\x08\0\0\0" + directory(entries, 0) + struct.pack("<I", 8) * (2 * count)


FAMILIES: dict[str, Callable[[], Family]] = {
    "npy": lambda: Family("npy", containers.array(1), hostile_npy, {"axis": 0}),
    "npy, whole": lambda: Family("npy", containers.array(1), hostile_npy),
    "npz": lambda: Family("npz", containers.archived(x=np.ones(4, "f4")), npz, large=large_npz),
    "hdf5": lambda: Family("hdf5", containers.hdf5s()[0]["0"], hdf5, large=large_hdf5),
    "hdf5 rows": lambda: Family("hdf5", containers.hdf5s()[0]["0"], hdf5, {"axis": 0}),
    "parquet": lambda: Family("parquet", containers.parquets()[0]["0"], lambda: containers.parquets()[1] | lists_of_parquet(), large=large_parquet),
    "tar": lambda: Family("tar", containers.tars()[0]["0"], lambda: containers.tars()[1]),
    "tar.gz": lambda: Family(
        "tar", gzip.compress(test_tar.archive([("0.cls", b"1")])), lambda: {"bomb": zeros_gz()},
        ending=".tar.gz",
    ),
    "jsonl.gz": lambda: Family(
        "jsonl", gzip.compress(b'{"a": 1}\n' * 9), lambda: {"bomb": zeros_gz()}, ending=".jsonl.gz"
    ),
    "tfrecord": lambda: Family(
        "tfrecord", containers.tfrecords()[0]["0"], lambda: containers.tfrecords()[1]
    ),
    "tfrecord.gz": lambda: Family(
        "tfrecord", gzip.compress(test_tfrecord.file([test_tfrecord.example({"x": [1.0]})])),
        lambda: {"bomb": zeros_gz()}, ending=".tfrecord.gz",
    ),
    "lmdb": lambda: Family("lmdb", containers.lmdbs()[0]["0"], lambda: containers.lmdbs()[1]),
    "image": lambda: Family("image", png(), image, {"decode": True, "label": "none"}, large=large_image),
    "edf": lambda: Family("edf", test_edf.recording({"C3": 32}, 60), edf, {"window": 32}),
    "fits": lambda: Family("fits", test_fits.small(), fits, {"axis": 0}),
    "dicom": lambda: Family("dicom", test_dicom.small(), dicom),
    "nifti": lambda: Family("nifti", test_nifti.small(), nifti, {"axis": 0}),
    "nifti.gz": lambda: Family(
        "nifti", gzip.compress(test_nifti.small(), mtime=0), nifti_gz, ending=".nii.gz"
    ),
    "wav": lambda: Family("audio", test_audio.audio(), audio, {"window": 7}),
    "flac": lambda: Family(
        "audio", test_audio.audio(form="FLAC"), flac, {"window": 7}, ending=".flac"
    ),
    "tiff": lambda: Family("tiff", test_tiff.small(), tiff, {"axis": 0}),
    "tiff, whole": lambda: Family("tiff", test_tiff.small(), tiff),
}  # fmt: skip


def main() -> None:
    for name in sys.argv[1:] or FAMILIES:
        made = FAMILIES[name]()
        _print_peak(name, made, large=False)
        if made.large is not dict:
            _print_peak(f"{name}, large", made, large=True)


def _print_peak(name: str, family: Family, *, large: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found = run_family(family, Path(folder), large=large)
        seconds = time.monotonic() - began
    verdict = "" if large or found.megabytes < MOST_MB else "  too much"
    print(f"{name}: {found.megabytes:.0f} MB in {seconds:.0f} s{verdict}", flush=True)
    if found.code:
        print(f"  exit code {found.code}: {found.said[-300:]}")


if __name__ == "__main__":
    main()
