"""Look into container objects: their arrays, columns or databases, and how to cut them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from growcache.cli.propose_hdf5 import (
    ANNDATA,
    MATLAB,
    NETCDF,
    NWB,
    HDF5Contents,
    hdf5_candidates,
)
from growcache.cli.propose_options import SMALL_BYTES, array_options, names_text
from growcache.cli.propose_recordings import Candidate
from growcache.errors import FormatError
from growcache.formats.base import ObjectReader, require_library
from growcache.formats.hdf5_dataset import (
    DatasetLayout,
    dataset_advice,
    describe_dataset,
)
from growcache.formats.hdf5_file import HDF5Files
from growcache.formats.hdf5_paths import dataset_paths
from growcache.formats.lmdb_tree import TreeReader
from growcache.formats.npy import read_npy_header
from growcache.formats.parquet import FooterBytes, parquet_errors
from growcache.formats.parquet_columns import check_column_type
from growcache.humanize import in_bytes, in_count, plural

NAME_DATASETS = "Name its datasets in options, as {datasets: [x, y], axis: 0}."

T = TypeVar("T")
R = TypeVar("R")


async def probe_npy(reader: ObjectReader, many: bool) -> list[Candidate]:
    try:
        header = await read_npy_header(reader)
    except FormatError as error:
        return await _probe_bfloat16(reader, many, error)
    if header.dtype.names is not None and header.shape:
        names = names_text([name for name in header.dtype.names if name.isprintable()])
        records = f"An array of {' by '.join(map(str, header.shape))} records{f' of {names}' if names else ' of text'}."
        return [({"axis": 0}, (records, "Each record is a sample."))]
    array = f"An array of {header.dtype.name}{list(header.shape)}, {in_bytes(header.nbytes)}"
    order = " in Fortran order" if header.fortran and len(header.shape) > 1 else ""
    options, sentence = array_options(header.shape, header.dtype.itemsize, many=many)
    return [(options, (f"{array}{order}.", sentence))]


async def _probe_bfloat16(
    reader: ObjectReader, many: bool, error: FormatError
) -> list[Candidate]:
    try:
        header = await read_npy_header(reader, dtype="bfloat16")
    except FormatError:
        raise error from None
    array = (
        f"An array of bfloat16{list(header.shape)}, as ml_dtypes has it; samples are float32."
    )
    options, sentence = array_options(header.shape, 4, many=many)
    return [({**options, "dtype": "bfloat16"}, (array, sentence))]


async def probe_npz(reader: ObjectReader, many: bool) -> list[Candidate]:
    whole: Candidate = ({}, ("All arrays of an archive form one sample.",))
    if many and reader.entry.size <= SMALL_BYTES:
        return [whole]
    rows = "Row i of each array is a sample"
    packed = f"{rows}; the arrays are compressed, so each archive is read whole."
    # Arrays of different lengths form one sample.
    return [({"axis": 0}, (f"{rows}.",)), ({"axis": 0, "read": "whole"}, (packed,)), whole]


async def probe_hdf5(reader: ObjectReader, many: bool) -> list[Candidate]:
    require_library("source.format: hdf5", "h5py", "hdf5")
    key = reader.entry.key
    found = await HDF5Files().get(reader.entry).call(reader, partial(_hdf5_contents, key=key))
    return hdf5_candidates(found, many=many)


def _hdf5_contents(file: Any, *, key: str) -> HDF5Contents:
    found, unreadable = _split_readable(
        partial(describe_dataset, file, key=key), dataset_paths(file)
    )
    coordinates = {one.path for one in found if _text_attribute(file[one.path], "CLASS")}
    scaled = {one.path for one in found if dataset_advice(file, one.path)}
    flavour = _hdf5_flavour(file, found)
    return HDF5Contents(found, unreadable, flavour, frozenset(coordinates), frozenset(scaled))


def _hdf5_flavour(file: Any, found: Sequence[DatasetLayout]) -> str:
    if "nwb_version" in file.attrs:
        return NWB
    if _text_attribute(file, "encoding-type") == "anndata":
        return ANNDATA
    if any("MATLAB_class" in file[one.path].attrs for one in found):
        return MATLAB
    is_netcdf = "_NCProperties" in file.attrs
    is_netcdf = is_netcdf or any("DIMENSION_LIST" in file[one.path].attrs for one in found)
    return NETCDF if is_netcdf else ""


def _text_attribute(item: Any, name: str) -> str:
    value = item.attrs.get(name, "")
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _split_readable(read: Callable[[T], R], items: Iterable[T]) -> tuple[list[R], list[str]]:
    found, errors = [], []
    for item in items:
        try:
            found.append(read(item))
        except FormatError as error:
            errors.append(str(error))
    return found, errors


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
    taken = f"Columns that can be read are used; {plural(len(bad), 'other')} left out: {bad[0].partition(';')[0]}."
    return [({"columns": good}, (table, taken))]


async def probe_lmdb(reader: ObjectReader, many: bool) -> list[Candidate]:
    found = await TreeReader(None).databases(reader)
    if not found:
        return [({}, ("Each value's bytes are a sample.",))]
    shown = names_text([f"{name} ({in_count(found[name])})" for name in found])
    databases = plural(len(found), "database")
    listed = f"An LMDB data file with {databases} (and their numbers of values): {shown}."
    return [({"database": max(found, key=lambda name: found[name])}, (listed,))]


CONTENT_PROBES: dict[str, Callable[[ObjectReader, bool], Awaitable[list[Candidate]]]] = {
    "hdf5": probe_hdf5,
    "lmdb": probe_lmdb,
    "npy": probe_npy,
    "npz": probe_npz,
    "parquet": probe_parquet,
}
