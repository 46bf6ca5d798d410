"""Look into objects that are containers: which arrays, columns or databases they hold, and how to cut them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from growcache.cli.humanize import in_bytes, in_count, plural
from growcache.cli.propose_options import SMALL_BYTES, Candidate, array_options, names_text
from growcache.errors import FormatError
from growcache.formats.base import ObjectReader, require_library
from growcache.formats.hdf5_dataset import (
    DatasetLayout,
    dataset_advice,
    dataset_paths,
    describe_dataset,
)
from growcache.formats.hdf5_file import HDF5Files
from growcache.formats.lmdb_tree import TreeReader
from growcache.formats.npy import read_npy_header
from growcache.formats.parquet import FooterBytes, parquet_errors
from growcache.formats.parquet_columns import check_column_type

MAX_DATASETS_TOGETHER = 8  # that become fields of one sample
SCALED = "attributes say what the stored numbers mean; scale: none takes them as they are."
NAME_DATASETS = "Name its datasets in options, as {datasets: [x, y], axis: 0}."

T = TypeVar("T")
R = TypeVar("R")


async def probe_npy(reader: ObjectReader, many: bool) -> list[Candidate]:
    header = await read_npy_header(reader)
    array = f"An array of {header.dtype.name}{list(header.shape)}, {in_bytes(header.nbytes)}."
    options, sentence = array_options(header.shape, header.dtype.itemsize, many=many)
    if options and header.fortran and len(header.shape) > 1:
        options = {}
        sentence = "Its rows are not contiguous (Fortran order): only whole arrays can be read."
    return [(options, (array, sentence))]


async def probe_npz(reader: ObjectReader, many: bool) -> list[Candidate]:
    if many and reader.entry.size <= SMALL_BYTES:
        return [({}, ())]
    # Compressed arrays are read at once. Arrays of different lengths are together one sample.
    return [({"axis": 0}, ()), ({"axis": 0, "read": "whole"}, ()), ({}, ())]


async def probe_hdf5(reader: ObjectReader, many: bool) -> list[Candidate]:
    require_library("source.format: hdf5", "h5py", "hdf5")

    def describe(file: Any) -> tuple[list[DatasetLayout], list[str], list[str]]:
        layout = partial(describe_dataset, file, key=reader.entry.key)
        readable, errors = _split_readable(layout, dataset_paths(file))
        return (
            readable,
            errors,
            [one.path for one in readable if dataset_advice(file, one.path)],
        )

    found, unreadable, scaled = await HDF5Files().get(reader.entry).call(reader, describe)
    dtypes = {one.path: "str" if one.string_storage else one.dtype.name for one in found}
    shown = [f"{one.path} {dtypes[one.path]}{list(one.shape)}" for one in found]
    listed = f"An HDF5 file with {plural(len(found), 'dataset')}: {names_text(shown)}."
    listed += f" {plural(len(unreadable), 'other')}: {unreadable[0]}." if unreadable else ""
    arrays = [one for one in found if one.shape]
    numbers = [one for one in arrays if not one.string_storage] or arrays
    if not numbers:
        raise FormatError(f"{listed} None is an array")
    main = max(numbers, key=lambda one: math.prod(one.shape) * one.dtype.itemsize)
    folder = main.path.rpartition("/")[0]
    siblings = [one for one in found if one.path.rpartition("/")[0] == folder]
    # What has scalars next to it is one sample, as a rule: an image with its label.
    many = many or not all(one.shape for one in siblings)
    options, sentence = array_options(main.shape, main.dtype.itemsize, many=many)
    if main.string_storage:
        options, sentence = {"axis": 0}, "Each of its texts is a sample."
    together = [one.path for one in siblings if _goes_along(one, main, options)]
    together = together if len(together) <= MAX_DATASETS_TOGETHER else [main.path]
    proposed = {"datasets": together, **options}
    findings = [listed, f"Of {main.path}: {sentence}"]
    if meant := [path for path in together if path in scaled]:
        proposed["scale"] = "cf"
        findings.append(f"{names_text(meant)}: {SCALED}")
    return [(proposed, findings)]


def _split_readable(read: Callable[[T], R], items: Iterable[T]) -> tuple[list[R], list[str]]:
    found, errors = [], []
    for item in items:
        try:
            found.append(read(item))
        except FormatError as error:
            errors.append(str(error))
    return found, errors


def _goes_along(one: DatasetLayout, main: DatasetLayout, options: dict[str, Any]) -> bool:
    if not options:  # the object is one sample, of which arrays of text are no values
        return not (one.string_storage and one.shape)
    is_row_of_text = "window" not in options and len(one.shape) == 1
    return one.shape[:1] == main.shape[:1] and (not one.string_storage or is_row_of_text)


async def probe_parquet(reader: ObjectReader, many: bool) -> list[Candidate]:
    require_library("source.format: parquet", "pyarrow", "parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    footer = await FooterBytes().of(reader)
    with parquet_errors(reader.entry):
        metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
        columns = metadata.schema.to_arrow_schema()

    def readable(column: Any) -> str:
        check_column_type(column.name, column.type)
        return str(column.name)

    good, bad = _split_readable(readable, columns)
    rows, names = plural(metadata.num_rows, "row"), names_text(columns.names)
    table = f"A Parquet table of {rows} with {names}; each row is a sample."
    if not bad or not good:
        return [({}, (table,))]
    taken = f"Those that can be read are taken; {plural(len(bad), 'other')}: {bad[0].partition(';')[0]}."
    return [({"columns": good}, (table, taken))]


async def probe_lmdb(reader: ObjectReader, many: bool) -> list[Candidate]:
    found = await TreeReader(None).databases(reader)
    if not found:
        return [({}, ("Each value's bytes are a sample.",))]
    shown = names_text([f"{name} ({in_count(found[name])})" for name in found])
    databases = plural(len(found), "database")
    listed = f"An LMDB data file with {databases}, by their values: {shown}."
    return [({"database": max(found, key=lambda name: found[name])}, (listed,))]


CONTENT_PROBES: dict[str, Callable[[ObjectReader, bool], Awaitable[list[Candidate]]]] = {
    "hdf5": probe_hdf5,
    "lmdb": probe_lmdb,
    "npy": probe_npy,
    "npz": probe_npz,
    "parquet": probe_parquet,
}
