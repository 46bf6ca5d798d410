"""Propose options for containers by their contents: HDF5, Parquet, Zarr, LMDB.

A proposal names arrays, columns and databases of the object that was read. If it cannot be read,
because a library is missing for example, the proposal says what to name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from growcache.cli.humanize import in_bytes, in_count, plural
from growcache.errors import FormatError, MissingLibraryError, ObjectMissingError
from growcache.formats.base import ObjectReader, require_library
from growcache.formats.hdf5_dataset import dataset_paths, describe_dataset
from growcache.formats.hdf5_file import HDF5Files
from growcache.formats.lmdb_tree import TreeReader
from growcache.formats.parquet_footer import check_column_type
from growcache.formats.zarr import ZarrMetadata, folder_of_chunk, open_zarr
from growcache.store.contract import Entry

SMALL_BYTES = 1 << 20  # an array up to this size is one sample, unless it looks like many


ROW_BYTES = 4096  # a row of this size can be a sample
ITEM_BYTES = 256  # the same where rows are themselves arrays
WINDOW_BYTES = 1 << 16
MAX_IMAGE_CHANNELS = 4  # channels


@dataclass(frozen=True, slots=True)
class FormatProposal:
    """A format for the objects of a source.

    Attributes:
        format: of the source.
        options: of the format.
        reasons: sentences that tell what was seen and what else could be meant.
        samples: about how many the object holds.
        sample_bytes: about how large each is.
    """

    format: str
    options: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    samples: int = 1
    sample_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ArrayCut:
    """How samples could be cut from an array.

    Attributes:
        options: of the format.
        how: a sentence.
        samples: that it yields.
        sample_bytes: of each.
    """

    options: dict[str, Any]
    how: str
    samples: int
    sample_bytes: int


def cut_array(shape: Sequence[int], item_bytes: int) -> ArrayCut:
    """Return how samples could be cut from an array of this shape."""
    nbytes = math.prod(shape) * item_bytes
    whole = ArrayCut({}, "The whole array is one sample.", 1, nbytes)
    if len(shape) == 0 or shape[0] <= 1 or nbytes == 0:
        return whole
    row = nbytes // shape[0]
    if _is_image(shape) or (nbytes <= SMALL_BYTES and len(shape) < 3):
        return whole
    if (len(shape) >= 3 and row >= ITEM_BYTES) or row >= ROW_BYTES:
        each = f"Each of its {in_count(shape[0])} rows {list(shape[1:])} is a sample"
        how = f"{each}, read by range; leave axis out to take whole arrays."
        return ArrayCut({"axis": 0}, how, shape[0], row)
    rows = window_rows(row, shape[0])
    each = f"Windows of {rows} rows along the first axis ({in_bytes(rows * row)} each)"
    how = f"{each}, read by range; a stride below {rows} lets them overlap."
    return ArrayCut({"window": rows}, how, shape[0] // rows, rows * row)


def _is_image(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and min(shape[0], shape[-1]) <= MAX_IMAGE_CHANNELS


def window_rows(row_bytes: int, rows: int) -> int:
    """Return how many rows make a window of about 64 KiB, and at least four per object.

    >>> window_rows(16, 10**9), window_rows(16, 1000), window_rows(3000, 10**6)
    (4096, 128, 16)
    """
    most = min(WINDOW_BYTES // max(1, row_bytes), rows // 4)
    return 1 << max(0, most.bit_length() - 1)


MAX_SHOWN = 8  # arrays, columns or databases that are named
MAX_DATASETS_TOGETHER = 8  # datasets that become fields of one sample
FOOTER_BYTES = 1 << 16
MAX_CHUNKS_TRIED = 8  # objects that may be chunks
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")

ContentProbe: TypeAlias = Callable[
    [FormatProposal, ObjectReader], Coroutine[Any, Any, FormatProposal]
]


async def probe_contents(proposal: FormatProposal, reader: ObjectReader) -> FormatProposal:
    """Return a proposal that goes by what an object holds, where its format needs that."""
    inside = CONTENT_PROBES.get(proposal.format)
    if inside is None:
        return proposal
    try:
        return await inside(proposal, reader)
    except MissingLibraryError as error:
        return _with_reasons(
            proposal,
            f"Not looked into: {error}.",
            HINTS_WITHOUT_LIBRARY.get(proposal.format, ""),
        )
    except FormatError as error:
        return _with_reasons(proposal, f"It cannot be read: {error}.")


def _with_reasons(proposal: FormatProposal, *reasons: str) -> FormatProposal:
    return replace(proposal, reasons=(*proposal.reasons, *filter(None, reasons)))


HINTS_WITHOUT_LIBRARY = {
    "hdf5": "Name its datasets in options, as {datasets: [x, y], axis: 0}.",
    "parquet": "All columns are taken; columns names those that are wanted.",
    "zarr": "Each row is a sample; window takes several rows.",
}


# ---------------------------------------------------------------------------- HDF5


@dataclass(frozen=True, slots=True)
class _ProbedDataset:
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


async def _probe_hdf5(proposal: FormatProposal, reader: ObjectReader) -> FormatProposal:
    require_library("hdf5", "h5py")
    file = HDF5Files().of(reader.entry)
    found = await file.ask(reader, lambda opened: _probe_datasets(opened, reader.entry.key))
    return _propose_hdf5(proposal, found)


def _probe_datasets(file: Any, key: str) -> list[_ProbedDataset]:
    return [_probe_dataset(file, path, key) for path in dataset_paths(file)]


def _probe_dataset(file: Any, path: str, key: str) -> _ProbedDataset:
    try:
        found = describe_dataset(file, path, key)
    except FormatError as error:
        return _ProbedDataset(path, why=str(error))
    text = found.strings is not None
    name = "str" if text else found.dtype.name
    return _ProbedDataset(path, found.shape, name, found.dtype.itemsize, text)


def _propose_hdf5(proposal: FormatProposal, found: Sequence[_ProbedDataset]) -> FormatProposal:
    arrays = [one for one in found if one.shape and not one.text and not one.why]
    shown = ", ".join(map(str, found[:MAX_SHOWN])) + (", …" if len(found) > MAX_SHOWN else "")
    what = f"An HDF5 file with {plural(len(found), 'dataset')}: {shown}." if found else ""
    if not arrays:
        reasons = (what or "An HDF5 file without datasets.", "None is an array of numbers.")
        return replace(proposal, reasons=reasons)
    main = max(arrays, key=lambda one: one.nbytes)
    cut = cut_array(main.shape, main.item_bytes)
    together = [one for one in found if _fits_main_dataset(one, main, cut.options)]
    if len(together) > MAX_DATASETS_TOGETHER:
        together = [main]
    options = {"datasets": [one.path for one in together], **cut.options}
    each = sum(one.nbytes // max(1, one.shape[0]) for one in together if one.shape)
    size = each * cut.sample_bytes // max(1, main.nbytes // main.shape[0])
    named = "datasets names those that are taken, as fields of one sample."
    return FormatProposal(
        "hdf5", options, (what, f"Of {main.path}: {cut.how}", named), cut.samples, size
    )


def _fits_main_dataset(
    one: _ProbedDataset, main: _ProbedDataset, options: dict[str, Any]
) -> bool:
    """Whether a dataset can be a field of the same samples as the main one."""
    if one.why or one.folder != main.folder:
        return False
    if not options:  # the object is one sample, of which arrays of text are no values
        return not (one.text and one.shape)
    rows = "window" not in options and len(one.shape) == 1
    return one.shape[:1] == main.shape[:1] and (not one.text or rows)


# ------------------------------------------------------------------------- Parquet


async def _probe_parquet(proposal: FormatProposal, reader: ObjectReader) -> FormatProposal:
    require_library("parquet", "pyarrow")
    metadata = await _read_footer(reader)
    columns = {
        field.name: _why_unreadable(field) for field in metadata.schema.to_arrow_schema()
    }
    good = [name for name, why in columns.items() if not why]
    rows = metadata.num_rows
    shown = ", ".join(list(columns)[:MAX_SHOWN]) + (", …" if len(columns) > MAX_SHOWN else "")
    what = f"A Parquet table of {plural(rows, 'row')} with {shown}; each row is a sample."
    reasons = [what, "All columns are taken; columns names those that are wanted."]
    options: dict[str, Any] = {}
    if len(good) < len(columns):
        options = {"columns": good} if good else {}
        bad = [why for why in columns.values() if why]
        reasons[1] = f"Those that can be read are taken; {plural(len(bad), 'other')}: {bad[0]}."
    each = reader.entry.size // max(1, rows)
    return FormatProposal("parquet", options, tuple(reasons), max(1, rows), each)


async def _read_footer(reader: ObjectReader) -> Any:
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


def _why_unreadable(field: Any) -> str:
    try:
        check_column_type(field.name, field.type)
    except FormatError as error:
        return str(error).partition(";")[0]
    return ""


# ---------------------------------------------------------------------------- Zarr


def is_zarr(entries: Sequence[Entry]) -> bool:
    """Whether what is listed are arrays of Zarr, or parts of them."""
    keys = [entry.key for entry in entries]
    return any(
        key.rpartition("/")[2] in ZARR_FILES or (".zarr/" in key and folder_of_chunk(key))
        for key in keys
    )


def chunks_of(entries: Sequence[Entry]) -> list[Entry]:
    """Return what may be chunks of the array of which most bytes are listed, a few of them."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        if root := folder_of_chunk(entry.key):
            sizes[root] += entry.size
    if not sizes:
        return []
    largest = sizes.most_common(1)[0][0]
    return [entry for entry in entries if folder_of_chunk(entry.key) == largest][
        :MAX_CHUNKS_TRIED
    ]


async def probe_zarr(
    readers: Sequence[ObjectReader], entries: Sequence[Entry]
) -> FormatProposal:
    """Return what is proposed for chunks of arrays.

    Args:
        readers: of objects that may be chunks.
        entries: of all that is listed.
    """
    size = readers[0].entry.size if readers else 0
    guess = FormatProposal(
        "zarr", {"axis": 0}, ("Arrays of Zarr, whose chunks are the objects.",), 1, size
    )
    if not readers:
        return _with_reasons(
            guess, "None is listed: let source.url match the chunks of an array."
        )
    try:
        require_library("zarr", "numcodecs")
        for reader in readers:
            found = await open_zarr({"axis": 0}).array_of(reader)
            if found is not None:
                return _propose_zarr(*found, _other_arrays(entries, found[0]))
    except MissingLibraryError as error:
        return _with_reasons(guess, f"Not looked into: {error}.", HINTS_WITHOUT_LIBRARY["zarr"])
    except (FormatError, ObjectMissingError) as error:
        return _with_reasons(guess, f"It cannot be read: {error}.")
    return _with_reasons(guess, "None is listed: let source.url match the chunks of an array.")


def _other_arrays(entries: Sequence[Entry], root: str) -> list[str]:
    roots = {folder_of_chunk(entry.key) for entry in entries} - {"", root}
    return sorted(roots)


def _propose_zarr(root: str, array: ZarrMetadata, others: Sequence[str]) -> FormatProposal:
    shape, item = array.shape, array.dtype.itemsize
    nbytes = math.prod(shape) * item
    row = nbytes // max(1, shape[0])
    cut = cut_array(shape, item)
    name = root.rstrip("/").rpartition("/")[2]
    what = f"An array of Zarr, {name}: {array.dtype.name}{list(shape)}, {in_bytes(nbytes)}."
    options, rows = {"axis": 0}, 1
    how = f"Each of its {in_count(shape[0])} rows is a sample"
    if "axis" not in cut.options:
        rows = _window_rows_in_chunk(row, array)
        options, how = {"window": rows}, f"Windows of {rows} rows are samples"
    reasons = [what, f"{how}; a chunk has {array.chunks[0]} rows, and is read whole."]
    if others:
        few = ", ".join(others[:MAX_SHOWN])
        reasons.append(
            f"Let source.url match the chunks of one array, {root}**; beside takes others of "
            f"equal length along. Chunks are listed of {few}, too."
        )
    return FormatProposal("zarr", options, tuple(reasons), max(1, shape[0] // rows), rows * row)


def _window_rows_in_chunk(row_bytes: int, array: ZarrMetadata) -> int:
    """Return how many rows make a window, such that windows divide chunks."""
    chunk = min(array.chunks[0], array.shape[0]) or 1
    most = min(chunk, max(1, window_rows(row_bytes, array.shape[0])))
    return max(rows for rows in range(1, most + 1) if chunk % rows == 0)


# ---------------------------------------------------------------------------- LMDB


async def _probe_lmdb(proposal: FormatProposal, reader: ObjectReader) -> FormatProposal:
    found = await TreeReader(None).databases(reader)
    if not found:
        return proposal
    largest = max(found, key=lambda name: found[name])
    shown = ", ".join(f"{name} ({in_count(found[name])})" for name in list(found)[:MAX_SHOWN])
    what = f"An LMDB data file with {plural(len(found), 'database')}, by their values: {shown}."
    entries = max(1, found[largest])
    each = reader.entry.size // max(1, sum(found.values()))
    reasons = (what, *proposal.reasons[1:])
    return FormatProposal("lmdb", {"database": largest}, reasons, entries, each)


CONTENT_PROBES: dict[str, ContentProbe] = {
    "hdf5": _probe_hdf5,
    "lmdb": _probe_lmdb,
    "parquet": _probe_parquet,
}
