"""What containers hold that tell little by their first bytes: HDF5, Parquet, Zarr, LMDB.

A proposal names arrays, columns and databases of the object that was looked at. Where a look
is not possible, for want of a library say, it tells what to name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from growcache.errors import FormatError, MissingLibraryError, ObjectMissingError
from growcache.remote.formats.hdf5_file import RemoteFiles
from growcache.remote.formats.hdf5_layout import dataset_paths, describe
from growcache.remote.formats.lmdb_tree import Trees
from growcache.remote.formats.objects import Reader, need_library
from growcache.remote.formats.parquet_values import check_type
from growcache.remote.formats.zarr import may_be_chunk, open_zarr
from growcache.remote.formats.zarr_metadata import ArrayMetadata
from growcache.remote.store import Entry
from growcache.service.proposal import Proposal, cut_of, window_rows
from growcache.service.words import in_bytes, in_count, plural

SHOWN = 8  # arrays, columns or databases that are named
MOST_TOGETHER = 8  # datasets that become fields of one sample
FOOTER_BYTES = 1 << 16
TRIED = 8  # objects that may be chunks
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")

Inside: TypeAlias = Callable[[Proposal, Reader], Coroutine[Any, Any, Proposal]]


async def looked_inside(proposal: Proposal, reader: Reader) -> Proposal:
    """Return a proposal that goes by what an object holds, where its format needs that."""
    inside = INSIDE.get(proposal.format)
    if inside is None:
        return proposal
    try:
        return await inside(proposal, reader)
    except MissingLibraryError as error:
        return _with(proposal, f"Not looked into: {error}.", UNSEEN.get(proposal.format, ""))
    except FormatError as error:
        return _with(proposal, f"It cannot be read: {error}.")


def _with(proposal: Proposal, *reasons: str) -> Proposal:
    return replace(proposal, reasons=(*proposal.reasons, *filter(None, reasons)))


UNSEEN = {
    "hdf5": "Name its datasets in options, as {datasets: [x, y], axis: 0}.",
    "parquet": "All columns are taken; columns names those that are wanted.",
    "zarr": "Each row is a sample; window takes several rows.",
}


# ---------------------------------------------------------------------------- HDF5


@dataclass(frozen=True, slots=True)
class _Dataset:
    """A dataset, or why it cannot be read."""

    path: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    item_bytes: int = 1
    text: bool = False
    why: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        what = "unreadable" if self.why else f"{self.dtype}{list(self.shape)}"
        return f"{self.path} {what}"


async def _hdf5(proposal: Proposal, reader: Reader) -> Proposal:
    need_library("hdf5", "h5py")
    file = RemoteFiles().of(reader.entry)
    found = await file.ask(reader, lambda opened: _datasets(opened, reader.entry.key))
    return _of_datasets(proposal, found)


def _datasets(file: Any, key: str) -> list[_Dataset]:
    return [_dataset(file, path, key) for path in dataset_paths(file)]


def _dataset(file: Any, path: str, key: str) -> _Dataset:
    try:
        found = describe(file, path, key)
    except FormatError as error:
        return _Dataset(path, why=str(error))
    text = found.strings is not None
    name = "str" if text else found.dtype.name
    return _Dataset(path, found.shape, name, found.dtype.itemsize, text)


def _of_datasets(proposal: Proposal, found: Sequence[_Dataset]) -> Proposal:
    arrays = [one for one in found if one.shape and not one.text and not one.why]
    shown = ", ".join(map(str, found[:SHOWN])) + (", …" if len(found) > SHOWN else "")
    what = f"An HDF5 file with {plural(len(found), 'dataset')}: {shown}." if found else ""
    if not arrays:
        reasons = (what or "An HDF5 file without datasets.", "None is an array of numbers.")
        return replace(proposal, reasons=reasons)
    main = max(arrays, key=lambda one: one.nbytes)
    cut = cut_of(main.shape, main.item_bytes)
    together = [one for one in found if _goes_with(one, main, cut.options)]
    if len(together) > MOST_TOGETHER:
        together = [main]
    options = {"datasets": [one.path for one in together], **cut.options}
    each = sum(one.nbytes // max(1, one.shape[0]) for one in together if one.shape)
    size = each * cut.sample_bytes // max(1, main.nbytes // main.shape[0])
    named = "datasets names those that are taken, as fields of one sample."
    return Proposal(
        "hdf5", options, (what, f"Of {main.path}: {cut.how}", named), cut.samples, size
    )


def _goes_with(one: _Dataset, main: _Dataset, options: dict[str, Any]) -> bool:
    """Whether a dataset can be a field of the same samples as the main one."""
    if one.why or one.folder != main.folder:
        return False
    if not options:  # the object is one sample, of which arrays of text are no values
        return not (one.text and one.shape)
    rows = "window" not in options and len(one.shape) == 1
    return one.shape[:1] == main.shape[:1] and (not one.text or rows)


# ------------------------------------------------------------------------- Parquet


async def _parquet(proposal: Proposal, reader: Reader) -> Proposal:
    need_library("parquet", "pyarrow")
    metadata = await _footer(reader)
    columns = {field.name: _complaint(field) for field in metadata.schema.to_arrow_schema()}
    good = [name for name, why in columns.items() if not why]
    rows = metadata.num_rows
    shown = ", ".join(list(columns)[:SHOWN]) + (", …" if len(columns) > SHOWN else "")
    what = f"A Parquet table of {plural(rows, 'row')} with {shown}; each row is a sample."
    reasons = [what, "All columns are taken; columns names those that are wanted."]
    options: dict[str, Any] = {}
    if len(good) < len(columns):
        options = {"columns": good} if good else {}
        bad = [why for why in columns.values() if why]
        reasons[1] = f"Those that can be read are taken; {plural(len(bad), 'other')}: {bad[0]}."
    each = reader.entry.size // max(1, rows)
    return Proposal("parquet", options, tuple(reasons), max(1, rows), each)


async def _footer(reader: Reader) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    size, wanted = reader.entry.size, FOOTER_BYTES
    for _ in range(2):  # mostly the first time is enough
        tail = bytes(memoryview(await reader.read(max(0, size - wanted), size)))
        wanted = int.from_bytes(tail[-8:-4], "little") + 8
        if wanted <= len(tail):
            break
    try:
        return pq.read_metadata(pa.BufferReader(b"PAR1" + tail[-wanted:]))
    except Exception as error:  # Arrow raises what a broken file makes it raise
        raise FormatError(f"{reader.entry.key}: {str(error)[:200]}") from error


def _complaint(field: Any) -> str:
    try:
        check_type(field.name, field.type)
    except FormatError as error:
        return str(error).partition(";")[0]
    return ""


# ---------------------------------------------------------------------------- Zarr


def is_zarr(entries: Sequence[Entry]) -> bool:
    """Whether what is listed are arrays of Zarr, or parts of them."""
    keys = [entry.key for entry in entries]
    return any(
        key.rpartition("/")[2] in ZARR_FILES or (".zarr/" in key and may_be_chunk(key))
        for key in keys
    )


def chunks_of(entries: Sequence[Entry]) -> list[Entry]:
    """Return what may be chunks of the array of which most bytes are listed, a few of them."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        if root := may_be_chunk(entry.key):
            sizes[root] += entry.size
    if not sizes:
        return []
    largest = sizes.most_common(1)[0][0]
    return [entry for entry in entries if may_be_chunk(entry.key) == largest][:TRIED]


async def zarr_proposal(readers: Sequence[Reader], entries: Sequence[Entry]) -> Proposal:
    """Return what is proposed for chunks of arrays.

    Args:
        readers: of objects that may be chunks.
        entries: of all that is listed.
    """
    size = readers[0].entry.size if readers else 0
    guess = Proposal(
        "zarr", {"axis": 0}, ("Arrays of Zarr, whose chunks are the objects.",), 1, size
    )
    if not readers:
        return _with(guess, "None is listed: let source.url match the chunks of an array.")
    try:
        need_library("zarr", "numcodecs")
        for reader in readers:
            found = await open_zarr({"axis": 0}).array_of(reader)
            if found is not None:
                return _of_array(*found, _arrays_beside(entries, found[0]))
    except MissingLibraryError as error:
        return _with(guess, f"Not looked into: {error}.", UNSEEN["zarr"])
    except (FormatError, ObjectMissingError) as error:
        return _with(guess, f"It cannot be read: {error}.")
    return _with(guess, "None is listed: let source.url match the chunks of an array.")


def _arrays_beside(entries: Sequence[Entry], root: str) -> list[str]:
    roots = {may_be_chunk(entry.key) for entry in entries} - {"", root}
    return sorted(roots)


def _of_array(root: str, array: ArrayMetadata, others: Sequence[str]) -> Proposal:
    shape, item = array.shape, array.dtype.itemsize
    nbytes = math.prod(shape) * item
    row = nbytes // max(1, shape[0])
    cut = cut_of(shape, item)
    name = root.rstrip("/").rpartition("/")[2]
    what = f"An array of Zarr, {name}: {array.dtype.name}{list(shape)}, {in_bytes(nbytes)}."
    options, rows = {"axis": 0}, 1
    how = f"Each of its {in_count(shape[0])} rows is a sample"
    if "axis" not in cut.options:
        rows = _rows_of_window(row, array)
        options, how = {"window": rows}, f"Windows of {rows} rows are samples"
    reasons = [what, f"{how}; a chunk has {array.chunks[0]} rows, and is read whole."]
    if others:
        few = ", ".join(others[:SHOWN])
        reasons.append(
            f"Let source.url match the chunks of one array, {root}**; beside takes others of "
            f"equal length along. Chunks are listed of {few}, too."
        )
    return Proposal("zarr", options, tuple(reasons), max(1, shape[0] // rows), rows * row)


def _rows_of_window(row_bytes: int, array: ArrayMetadata) -> int:
    """Return how many rows make a window, such that windows divide chunks."""
    chunk = min(array.chunks[0], array.shape[0]) or 1
    most = min(chunk, max(1, window_rows(row_bytes, array.shape[0])))
    return max(rows for rows in range(1, most + 1) if chunk % rows == 0)


# ---------------------------------------------------------------------------- LMDB


async def _lmdb(proposal: Proposal, reader: Reader) -> Proposal:
    found = await Trees(None).databases(reader)
    if not found:
        return proposal
    largest = max(found, key=lambda name: found[name])
    shown = ", ".join(f"{name} ({in_count(found[name])})" for name in list(found)[:SHOWN])
    what = f"An LMDB data file with {plural(len(found), 'database')}, by their values: {shown}."
    entries = max(1, found[largest])
    each = reader.entry.size // max(1, sum(found.values()))
    reasons = (what, *proposal.reasons[1:])
    return Proposal("lmdb", {"database": largest}, reasons, entries, each)


INSIDE: dict[str, Inside] = {"hdf5": _hdf5, "lmdb": _lmdb, "parquet": _parquet}
