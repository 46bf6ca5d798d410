"""What a source does of itself: compression of each object, classes, manifests, and files no one meant."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values
from tests.matrix.cases_records import (
    read_line,
    read_members,
    read_picture,
    same,
    unzstd,
    write_folders,
    write_lines,
    write_tar,
    zstd,
)
from tests.matrix.cases_science import read_nifti, write_nifti

# --- compression, object by object

UNPACK = {".gz": gzip.decompress, ".zst": unzstd}


def write_mixed_lines(folder: Path) -> None:
    for pack, ending in ((same, ""), (gzip.compress, ".gz"), (zstd, ".zst")):
        (folder / ending.strip(".")).mkdir(exist_ok=True)
        write_lines(folder / ending.strip("."), pack, ending)


def read_mixed_line(place: Place) -> Values:
    return read_line(place, UNPACK.get(place.path.suffix, same))


def write_promised(folder: Path) -> None:
    """Lines that are named as compressed, and are not, as a server hands them over."""
    write_lines(folder, same, ".gz")


def write_mixed_archives(folder: Path) -> None:
    for mode in ("w", "w:gz"):
        (folder / mode[2:]).mkdir(exist_ok=True)
        write_tar(folder / mode[2:], mode)


def read_mixed_members(place: Place) -> Values:
    return read_members(place, packed=place.path.suffix == ".gz")


def write_mixed_volumes(folder: Path) -> None:
    for ending in (".nii", ".nii.gz"):
        (folder / ending.strip(".")).mkdir()
        write_nifti(folder / ending.strip("."), "<i2", ending)


COMPRESSED = [
    Case("json.dumps", ".jsonl, .jsonl.gz and .jsonl.zst", "jsonl", write_mixed_lines, read_mixed_line, 30,
         url="**", needs=("zstandard",)),
    Case("json.dumps", ".jsonl.gz without its compression", "jsonl", write_promised,
         partial(read_line, unpack=same), 10, url="**"),
    Case("tarfile", ".tar and .tar.gz", "tar", write_mixed_archives, read_mixed_members, 16, url="**", needs=("PIL",)),
    Case("nibabel", ".nii and .nii.gz", "nifti", write_mixed_volumes, partial(read_nifti, whole=True), 4,
         url="**", needs=("nibabel",)),
    Case("nibabel", ".nii and .nii.gz", "nifti", write_mixed_volumes, partial(read_nifti, whole=False), 12,
         {"window": 2, "axis": 0}, url="**", needs=("nibabel",)),
]  # fmt: skip

# --- classes

STATES = ("task", "rest", "", "move")


def write_labelled(folder: Path) -> None:
    rows = ["path,subject,state,run"]
    for i in range(8):
        np.save(folder / f"{i}.npy", np.arange(3, dtype="<f4") + i)
        rows.append(f"{i}.npy,s{i % 2},{STATES[i % 4]},{10 - i}")
    (folder / "labels.csv").write_text("\n".join(rows), encoding="utf-8")


def read_labelled(
    place: Place, classes: dict[str, list[str]], columns: tuple[str, ...]
) -> Values:
    i = int(place.path.stem)
    cells: dict[str, Any] = {"subject": f"s{i % 2}", "state": STATES[i % 4], "run": 10 - i}
    labels = {
        name: np.int64(classes[name].index(str(cells[name])))
        if name in classes
        else np.int64(cells[name])
        for name in columns
    }
    return {"x": np.load(place.path), **labels}


def _labelled(classes: Any, named: dict[str, list[str]], samples: int, *columns: str) -> Case:
    table = {"url": "{files}/labels.csv", "key": "path", "columns": list(columns)}
    return Case(
        "numpy.save",
        f".npy with a table of labels, classes: {json.dumps(classes)}",
        "npy",
        write_labelled,
        partial(read_labelled, classes=named, columns=columns),
        samples,
        url="*.npy",
        source={"labels": {**table, "classes": classes}, "on_missing": "skip"},
    )


CLASSES = [
    _labelled("auto", {"state": ["move", "rest", "task"], "subject": ["s0", "s1"]}, 6,
              "subject", "state", "run"),
    _labelled(["task", "rest"], {"state": ["task", "rest"]}, 4, "state"),
    _labelled({"run": "auto"}, {"run": [str(n) for n in range(3, 11)]}, 8, "run"),
    Case("Pillow", "PNG in a folder for each class", "image", partial(write_folders, kind="PNG"),
         partial(read_picture, pixels=False, classes=True), 6, {"classes": "auto"}, url="**", needs=("PIL",)),
]  # fmt: skip

# --- manifests, and files that no one meant


def write_arrays(folder: Path) -> None:
    for i in range(6):
        np.save(folder / f"{i}.npy", np.arange(3, dtype="<f4") + i)


def read_array(place: Place) -> Values:
    return {"x": np.load(place.path)}


def write_parquet_keys(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_arrays(folder)
    keys = [f"{i}.npy" for i in (4, 1, 0)]
    sizes = [(folder / key).stat().st_size for key in keys]
    pq.write_table(pa.table({"path": keys, "size": sizes}), folder / "keys.parquet")


def write_text_keys(folder: Path) -> None:
    write_arrays(folder)
    (folder / "keys.txt").write_text("3.npy\n5.npy\n", encoding="utf-8")


def write_inventory(folder: Path) -> None:
    """What S3 Inventory delivers, with a key that is encoded, an old version and a deletion."""
    write_arrays(folder)
    np.save(folder / "a b.npy", np.zeros(3, "<f4"))
    keys = [
        ("a%20b", "true", "false"),
        ("1", "true", "false"),
        ("2", "false", "false"),
        ("3", "true", "true"),
    ]
    rows = "".join(
        f'"b","{folder}/{key}.npy","v","{latest}","{marker}","140"\n' for key, latest, marker in keys
    )  # fmt: skip
    for name in ("data", "2026-01-01T00-00Z"):
        (folder / "inventory" / name).mkdir(parents=True)
    (folder / "inventory" / "data" / "u.csv.gz").write_bytes(gzip.compress(rows.encode()))
    values = {
        "fileFormat": "CSV",
        "fileSchema": "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size",
        "files": [{"key": "inventory/data/u.csv.gz"}],
    }
    path = folder / "inventory" / "2026-01-01T00-00Z" / "manifest.json"
    path.write_text(json.dumps(values), encoding="utf-8")


def write_with_junk(folder: Path) -> None:
    write_arrays(folder)
    (folder / ".ipynb_checkpoints").mkdir()
    for name in (
        ".DS_Store",
        "._1.npy",
        "_SUCCESS",
        ".1.npy.crc",
        ".ipynb_checkpoints/1.npy",
        "empty.npy",
    ):
        (folder / name).write_bytes(b"" if name == "empty.npy" else b"junk")  # fmt: skip


def write_lines_with_junk(folder: Path) -> None:
    write_lines(folder, gzip.compress, ".gz")
    for name in ("_SUCCESS", "_committed_77", "_started_77", ".part-0.crc"):
        (folder / name).write_bytes(b"junk")


SOURCES = [
    Case("pyarrow.parquet", "keys.parquet as the manifest of .npy", "npy", write_parquet_keys, read_array, 3,
         url="*.npy", source={"manifest": "{files}/keys.parquet"}, needs=("pyarrow",)),
    Case("numpy.save", ".npy with keys.txt as the manifest", "npy", write_text_keys, read_array, 2,
         url="*.npy", source={"manifest": "{files}/keys.txt"}),
    Case("S3 Inventory", "manifest.json and CSV of .npy", "npy", write_inventory, read_array, 2, url="*.npy",
         source={"manifest": "{files}/inventory/2026-01-01T00-00Z/manifest.json"}),
    Case("numpy.save", ".npy with .DS_Store, checkpoints and empty files", "npy", write_with_junk, read_array, 6, url="**"),
    Case("Spark", ".jsonl.gz with _SUCCESS, _committed_* and .crc", "jsonl", write_lines_with_junk,
         partial(read_line, unpack=gzip.decompress), 10, url="*"),
]  # fmt: skip
CASES = [*COMPRESSED, *CLASSES, *SOURCES]
