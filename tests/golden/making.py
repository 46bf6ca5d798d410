"""The objects of the golden configurations, byte for byte the same on every machine.

Objects are put together by hand here, because a library's output depends on its version, and the
size of an object decides how it is cut. Those of Parquet, HDF5 and LMDB are in ``files/``.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
ARRAYS = 12
CODE = """
import numpy as np


def noisy(sample, rng):
    x = sample["x"]
    return {"x": x + rng.random(x.shape, dtype=np.float32), "mean": x.mean()}


def read(object, rng):
    data = np.frombuffer(object.read(128, object.size), np.float32).reshape(-1, 4)
    for row in rng.permutation(len(data))[:3]:
        yield {"x": data[row]}
"""


def make(root: Path) -> None:
    """Write all objects below a folder."""
    for name in ("rows", "grown", "late", "ragged", "words", "npz", "raw", "pairs", "tables"):
        (root / name).mkdir(parents=True)
    for kind in ("parquet", "hdf5", "lmdb"):
        shutil.copytree(HERE / "files" / kind, root / kind)
    for n in range(ARRAYS):
        rows = 2 + 3 * n
        array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) + 1000 * n
        write_npy(root / f"rows/sub-{n % 4}-{n:02}.npy", array)
        write_npy(root / f"{'late' if n % 3 == 0 else 'grown'}/{n:02}.npy", array)
        write_npy(root / f"ragged/{n:02}.npy", array[: 1 + n % 5])
        write_npy(root / f"pairs/x_{n}.npy", array)
        write_npy(root / f"pairs/y_{n}.npy", np.arange(rows, dtype=np.int64) + n)
        write_npz(root / f"npz/{n:02}.npz", {"x": array, "y": array[:, 0].astype(np.int32)})
        (root / f"raw/{n:02}.dat").write_bytes(bytes(16) + array.astype(">i2").tobytes())
        lines = [{"text": f"{n}-{i}" * (1 + i % 3), "label": i % 4} for i in range(rows)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (root / f"words/{n:02}.jsonl").write_text(text)
    write_records(root)
    write_archives(root)
    write_pictures(root)
    write_zarr(root)
    table = "".join(f"sub-{n % 4}-{n:02}.npy,{n % 3},{n / 8}\n" for n in range(ARRAYS))
    (root / "tables/labels.csv").write_text("name,state,score\n" + table)


def npy(array: npt.NDArray[np.generic]) -> bytes:
    text = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape}, }}"
    head = text.ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + array.tobytes()


def write_npy(path: Path, array: npt.NDArray[np.generic]) -> None:
    path.write_bytes(npy(array))


def write_npz(path: Path, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), npy(array))


def write_records(root: Path) -> None:
    (root / "records").mkdir()
    for n in range(4):
        bodies = (f"record {n} {i} ".encode() * (1 + i % 7) for i in range(40))
        records = (framed(body) for body in bodies)
        (root / f"records/{n}.tfrecord").write_bytes(b"".join(records))


def framed(body: bytes) -> bytes:
    length = struct.pack("<Q", len(body))
    return length + masked(length) + body + masked(body)


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write_archives(root: Path) -> None:
    (root / "archives").mkdir()
    for n in range(3):
        with tarfile.open(root / f"archives/{n}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(20):
                add(tar, f"{n}{i:03}.txt", f"text {n} {i}".encode())
                add(tar, f"{n}{i:03}.cls", str(i % 5).encode())


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_pictures(root: Path) -> None:
    for label in ("cat", "dog"):
        (root / "pictures" / label).mkdir(parents=True)
        for i in range(12):
            pixels = np.arange(27, dtype=np.uint8).reshape(3, 9) + i + 100 * (label == "dog")
            (root / f"pictures/{label}/{i:02}.png").write_bytes(png(pixels))


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A picture of RGB whose compressed part is stored, which all versions of zlib do alike."""
    height, width = len(pixels), pixels.shape[1] // 3
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    stored = b"\x78\x01\x01" + struct.pack("<HH", len(rows), len(rows) ^ 0xFFFF) + rows
    stored += struct.pack(">I", zlib.adler32(rows))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", stored), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def write_zarr(root: Path) -> None:
    for n in range(2):
        folder = root / f"zarr/{n}.zarr/signal"
        folder.mkdir(parents=True)
        meta = {"zarr_format": 2, "shape": [64, 3], "chunks": [8, 3], "dtype": "<f4"}
        meta |= {"compressor": None, "filters": None, "fill_value": 0, "order": "C"}
        (folder / ".zarray").write_text(json.dumps(meta))
        array = np.arange(192, dtype=np.float32).reshape(64, 3) + 1000 * n
        for chunk in range(8):
            (folder / f"{chunk}.0").write_bytes(array[8 * chunk :][:8].tobytes())
