"""Propose options for objects that hold arrays, by what they hold: NumPy, HDF5, Parquet, Zarr, LMDB.

Each probe returns candidates, the best first. `source_probe` proves them by reading.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from growcache.cli.humanize import in_bytes, in_count, plural
from growcache.errors import FormatError
from growcache.formats.base import ObjectReader, require_library
from growcache.formats.hdf5_dataset import DatasetLayout, dataset_paths, describe_dataset
from growcache.formats.hdf5_file import HDF5Files
from growcache.formats.lmdb_tree import TreeReader
from growcache.formats.npy import read_npy_header
from growcache.formats.parquet_footer import FooterCache, check_column_type
from growcache.formats.zarr import ZarrMetadata

SMALL_BYTES = 1 << 20  # up to this size an array is one sample, where there are many objects
ROW_BYTES = 4096  # a row of this size can be a sample
SUBARRAY_BYTES = 256  # the same where rows are themselves arrays
WINDOW_BYTES = 1 << 16
MAX_IMAGE_CHANNELS = 4
MIN_IMAGE_SIDE = 16
MAX_NAMED = 8  # arrays, columns or databases
MAX_DATASETS_TOGETHER = 8  # that become fields of one sample
WHOLE = "The whole array is one sample."


@dataclass(frozen=True, slots=True)
class FormatProposal:
    """A format for the objects of a source, and sentences about what was found.

    ``samples`` of ``sample_bytes`` are about what all objects hold; 0 before they were read.
    """

    format: str
    options: dict[str, Any] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    samples: int = 0
    sample_bytes: int = 0


def array_options(
    shape: Sequence[int], item_bytes: int, *, many: bool, chunk_rows: int = 0
) -> tuple[dict[str, Any], str]:
    """Return how samples are cut from an array, as options and as a sentence.

    Args:
        shape: of the array.
        item_bytes: of one value.
        many: whether there are enough objects for each to be a sample.
        chunk_rows: rows that are read together, which windows divide; 0: rows are apart.
    """
    nbytes = math.prod(shape) * item_bytes
    small = many and nbytes <= SMALL_BYTES and len(shape) < 3
    if not shape or shape[0] <= 1 or not nbytes or small or _is_image(shape):
        return {}, WHOLE
    row = nbytes // shape[0]
    if row >= (SUBARRAY_BYTES if len(shape) > 2 else ROW_BYTES):
        rows, each = 1, f"Each of its {in_count(shape[0])} rows {list(shape[1:])} is a sample"
        return {"axis": 0}, f"{each}, read by range; leave axis out to take whole arrays."
    rows = window_rows(row, shape[0])
    if chunk_rows:
        rows = max(n for n in range(1, min(rows, chunk_rows) + 1) if chunk_rows % n == 0)
    each = f"Windows of {rows} rows along the first axis ({in_bytes(rows * row)} each)"
    return {"window": rows}, f"{each}, read by range; a smaller stride lets them overlap."


def _is_image(shape: Sequence[int]) -> bool:
    if len(shape) != 3 or min(shape[0], shape[-1]) > MAX_IMAGE_CHANNELS:
        return False
    return sorted(shape)[1] >= MIN_IMAGE_SIDE


def window_rows(row_bytes: int, rows: int) -> int:
    """Return how many rows make a window of about 64 KiB, and at least four per object.

    >>> window_rows(16, 10**9), window_rows(16, 1000), window_rows(3000, 10**6)
    (4096, 128, 16)
    """
    most = min(WINDOW_BYTES // max(1, row_bytes), rows // 4)
    return 1 << max(0, most.bit_length() - 1)


def names_text(names: Sequence[str]) -> str:
    """Return the first few names."""
    return ", ".join([*names[:MAX_NAMED], *(["…"] if len(names) > MAX_NAMED else [])])


async def probe_npy(reader: ObjectReader, *, many: bool) -> list[FormatProposal]:
    header = await read_npy_header(reader)
    array = f"An array of {header.dtype.name}{list(header.shape)}, {in_bytes(header.nbytes)}."
    options, sentence = array_options(header.shape, header.dtype.itemsize, many=many)
    if options and header.fortran and len(header.shape) > 1:
        options = {}
        sentence = "Its rows are not contiguous (Fortran order): only whole arrays can be read."
    return [FormatProposal("npy", options, (array, sentence))]


async def probe_npz(reader: ObjectReader, *, many: bool) -> list[FormatProposal]:
    archive = f"An archive of arrays, {in_bytes(reader.entry.size)}"
    rows = f"{archive}; row i of all of them is a sample; fields takes some of them."
    whole = FormatProposal("npz", {}, (f"{archive}; together they are one sample.",))
    if many and reader.entry.size <= SMALL_BYTES:
        return [whole]
    by_range, at_once = {"axis": 0}, {"axis": 0, "read": "whole"}  # at once: where compressed
    return [
        *(FormatProposal("npz", options, (rows,)) for options in (by_range, at_once)),
        whole,
    ]


async def probe_hdf5(reader: ObjectReader, *, many: bool) -> list[FormatProposal]:
    require_library("source.format: hdf5", "h5py", "hdf5")
    file = HDF5Files().get(reader.entry)
    found, unreadable = await file.ask(reader, lambda file: _layouts(file, reader.entry.key))
    shown = [f"{one.path} {_dtype_name(one)}{list(one.shape)}" for one in found]
    listed = f"An HDF5 file with {plural(len(found), 'dataset')}: {names_text(shown)}."
    listed += f" {plural(len(unreadable), 'other')}: {unreadable[0]}." if unreadable else ""
    arrays = [one for one in found if one.shape]
    numbers = [one for one in arrays if not one.string_storage] or arrays
    if not numbers:
        raise FormatError(f"{listed} None is an array")
    main = max(numbers, key=_nbytes)
    siblings = [one for one in found if _folder(one.path) == _folder(main.path)]
    # What has scalars next to it is one sample, as a rule: an image with its label.
    many = many or not all(one.shape for one in siblings)
    options, sentence = array_options(main.shape, main.dtype.itemsize, many=many)
    if main.string_storage:
        options, sentence = {"axis": 0}, "Each of its texts is a sample."
    together = [one.path for one in siblings if _goes_along(one, main, options)]
    together = together if len(together) <= MAX_DATASETS_TOGETHER else [main.path]
    named = "datasets names those that are taken, as fields of one sample."
    findings = (listed, f"Of {main.path}: {sentence}", named)
    return [FormatProposal("hdf5", {"datasets": together, **options}, findings)]


def _layouts(file: Any, key: str) -> tuple[list[DatasetLayout], list[str]]:
    found, unreadable = [], []
    for path in dataset_paths(file):
        try:
            found.append(describe_dataset(file, path, key))
        except FormatError as error:
            unreadable.append(str(error))
    return found, unreadable


def _nbytes(layout: DatasetLayout) -> int:
    return math.prod(layout.shape) * layout.dtype.itemsize


def _dtype_name(layout: DatasetLayout) -> str:
    return "str" if layout.string_storage else layout.dtype.name


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _goes_along(one: DatasetLayout, main: DatasetLayout, options: dict[str, Any]) -> bool:
    """Whether a dataset can be a field of the same samples as the main one."""
    if not options:  # the object is one sample, of which arrays of text are no values
        return not (one.string_storage and one.shape)
    is_row_of_text = "window" not in options and len(one.shape) == 1
    return one.shape[:1] == main.shape[:1] and (not one.string_storage or is_row_of_text)


async def probe_parquet(reader: ObjectReader, *, many: bool) -> list[FormatProposal]:
    require_library("source.format: parquet", "pyarrow", "parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    footer = await FooterCache(None).footer_bytes(reader)
    try:
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        columns = {
            one.name: _unreadable_reason(one) for one in metadata.schema.to_arrow_schema()
        }
    except Exception as error:  # Arrow raises what a broken file makes it raise
        raise FormatError(f"{reader.entry.key}: {str(error)[:200]}") from error
    good = [name for name, reason in columns.items() if not reason]
    bad = [reason for reason in columns.values() if reason]
    rows, names = plural(metadata.num_rows, "row"), names_text(list(columns))
    table = f"A Parquet table of {rows} with {names}; each row is a sample."
    if not bad or not good:
        taken = "All columns are taken; columns names those that are wanted."
        return [FormatProposal("parquet", {}, (table, taken))]
    taken = f"Those that can be read are taken; {plural(len(bad), 'other')}: {bad[0]}."
    return [FormatProposal("parquet", {"columns": good}, (table, taken))]


def _unreadable_reason(column: Any) -> str:
    try:
        check_column_type(column.name, column.type)
    except FormatError as error:
        return str(error).partition(";")[0]
    return ""


async def probe_lmdb(reader: ObjectReader, *, many: bool) -> list[FormatProposal]:
    found = await TreeReader(None).databases(reader)
    listed = "An LMDB data file."
    if found:
        shown = names_text([f"{name} ({in_count(found[name])})" for name in found])
        databases = plural(len(found), "database")
        listed = f"An LMDB data file with {databases}, by their values: {shown}."
    values = (
        "Each value's bytes are a sample; decode names a function of yours that makes arrays of "
        "them, and database one of several databases."
    )
    options = {"database": max(found, key=lambda name: found[name])} if found else {}
    return [FormatProposal("lmdb", options, (listed, values))]


def propose_zarr(root: str, array: ZarrMetadata, others: Sequence[str]) -> FormatProposal:
    """Return what is proposed for chunks of an array in the folder ``root``.

    Args:
        root: the key of its folder.
        array: what its metadata say.
        others: folders of other arrays of which chunks are listed.
    """
    shape, item = array.shape, array.dtype.itemsize
    chunk_rows = min(array.chunks[0], shape[0]) or 1
    options, sentence = array_options(shape, item, many=False, chunk_rows=chunk_rows)
    name, size = root.rstrip("/").rpartition("/")[2], in_bytes(math.prod(shape) * item)
    listed = f"An array of Zarr, {name}: {array.dtype.name}{list(shape)}, {size}."
    if not options:
        options, sentence = {"axis": 0}, "Each row is a sample."
    findings = [listed, f"{sentence} A chunk has {array.chunks[0]} rows, and is read whole."]
    if others:
        findings.append(
            f"Let source.url match the chunks of one array, {root}**; beside takes others of "
            f"equal length along. Chunks are listed of {names_text(others)}, too."
        )
    return FormatProposal("zarr", options, tuple(findings))


CONTENT_PROBES: dict[str, Callable[..., Awaitable[list[FormatProposal]]]] = {
    "hdf5": probe_hdf5,
    "lmdb": probe_lmdb,
    "npy": probe_npy,
    "npz": probe_npz,
    "parquet": probe_parquet,
}
