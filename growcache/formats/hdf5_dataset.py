"""The layout of an HDF5 dataset, and the decoding of its chunks and strings.

No other file is ever opened: external and user-defined links, external storage and virtual
datasets are refused. Chunks are decoded in parallel threads. Only filters that growcache does
not decode itself run in the library.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import MOST_VISIT_BYTES, ObjectReader
from growcache.formats.byte_ranges import read_ranges
from growcache.formats.chunk_codecs import (
    BLOSC,
    FLETCHER32,
    ZLIB,
    ZSTD,
    Step,
    decode_steps,
    shuffle_step,
)
from growcache.formats.chunks import ChunkGrid, is_numeric
from growcache.formats.hdf5_file import MetadataImage, without_garbage_collection
from growcache.formats.hdf5_filters import BZIP2, HDF5_LZ4, bitshuffle_step
from growcache.formats.hdf5_paths import dataset_at
from growcache.formats.scales import (
    CHANNEL_AXIS,
    CHANNEL_CONVERSION,
    MOST_ATTRIBUTE_VALUES,
    SCALE_NAMES,
    Scale,
    array_scale,
    has_nwb_conversion,
    scale_advice,
)
from growcache.schema import Array

_BYTES_REQUIRED = re.compile(r"([0-9]+) bytes required")

ChunkLocation = tuple[int, int, int]


def locate_chunks(
    file: Any, image: MetadataImage, path: str, places: Sequence[tuple[int, ...]]
) -> list[ChunkLocation | None]:
    """Return the places of chunks, given by their first elements; None for unwritten chunks.

    The dataset must have a written chunk, because otherwise the library answers wrongly. Each
    chunk is read twice without success. The first read, into no memory, looks up its size. The
    second, from an image that claims to have all bytes, shows its range. The library's own
    functions would walk through the index from its start.
    """
    dataset = dataset_at(file, path).id
    return [_locate_chunk(dataset, image, place) for place in places]


def _locate_chunk(
    dataset: Any, image: MetadataImage, place: tuple[int, ...]
) -> ChunkLocation | None:
    missing = len(image.missing)
    needed = 0
    try:
        dataset.read_direct_chunk(place, out=bytearray(0))
    except (ValueError, RuntimeError, OSError) as error:
        if len(image.missing) > missing or "not allocated" in str(error):
            return None
        told = _BYTES_REQUIRED.search(str(error))  # the chunk exists and needs memory
        if told is None:
            raise
        needed = int(told[1])
    if needed > image.size:
        raise OSError(f"a chunk of {needed} bytes in a file of {image.size}")
    mask, found = image.locate(lambda: int(dataset.read_direct_chunk(place)[0]))
    return (*found, mask)


Filter = tuple[int, int, tuple[int, ...]]
"""Number, flags and values of a filter."""


@dataclass(frozen=True, slots=True)
class DatasetLayout:
    path: str
    shape: tuple[int, ...]  # () for a single value
    dtype: np.dtype[Any]  # of a stored value; `HEAP_ID` for strings of any length
    chunks: tuple[int, ...] | None  # shape of a chunk; None: contiguous values
    offset: int | None  # of contiguous values; None: never written
    has_chunks: bool  # whether any chunk was written
    inline_values: bytes | None  # values that the header holds
    fill: Array  # value of unwritten chunks
    filters: tuple[Filter, ...]  # in the order of writing
    string_storage: str | None  # heap, spaces or zeros; None: numbers
    address_base: int  # byte from which addresses in the file count
    encoded_type: bytes | None = None  # HDF5's encoding of a type that NumPy lacks; else None
    lacks_fill: bool = False  # whether the file has no fill value
    scale: Scale | None = None  # of the values, if the configuration asks for it


def describe_dataset(file: Any, path: str, key: str, *, scaled: bool = False) -> DatasetLayout:
    try:
        dataset = dataset_at(file, path)
        layout = _dataset_layout(file, dataset, path)
        return replace(layout, scale=_scale_of(dataset, layout)) if scaled else layout
    except FormatError as error:
        raise FormatError(f"{key}: {error}", code=error.code) from None


def dataset_advice(file: Any, path: str) -> str:
    dataset = dataset_at(file, path)
    return scale_advice(f"dataset {path}", dataset.dtype, _scale_attributes(dataset))


def _scale_of(dataset: Any, layout: DatasetLayout) -> Scale | None:
    if layout.string_storage:
        return None
    attributes = _scale_attributes(dataset)
    channels = None
    if has_nwb_conversion(attributes):
        channels = _channel_factors(dataset, layout.shape)
    try:
        return array_scale(layout.dtype, attributes, channels)
    except FormatError as error:
        raise FormatError(f"dataset {layout.path}: {error}", code=error.code) from None


def _scale_attributes(dataset: Any) -> dict[str, Any]:
    """Return the attributes that describe a scale, without long ones and other types."""
    import h5py

    known = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.STRING)
    found: dict[str, Any] = {}
    for name in SCALE_NAMES:
        if not h5py.h5a.exists(dataset.id, name.encode()):
            continue
        attribute = h5py.h5a.open(dataset.id, name.encode())
        values = attribute.get_space().get_simple_extent_npoints()
        if attribute.get_type().get_class() in known and 0 < values <= MOST_ATTRIBUTE_VALUES:
            found[name] = dataset.attrs[name]
    return found


def _channel_factors(dataset: Any, shape: tuple[int, ...]) -> Array | None:
    import h5py

    group = dataset.parent
    if not isinstance(group.get(CHANNEL_CONVERSION, getlink=True, default=None), h5py.HardLink):
        return None
    found = group[CHANNEL_CONVERSION]
    if not isinstance(found, h5py.Dataset) or found.shape != shape[CHANNEL_AXIS:][:1]:
        raise FormatError(
            f"expected {CHANNEL_CONVERSION} with a number for each of the channels, found shape "
            f"{getattr(found, 'shape', None)} next to data of {list(shape)}"
        )
    return np.asarray(found[()], np.float64)


def _dataset_layout(file: Any, dataset: Any, path: str) -> DatasetLayout:
    import h5py

    plist = dataset.id.get_create_plist()
    kind = plist.get_layout()
    if kind == h5py.h5d.VIRTUAL:
        raise FormatError(
            f"dataset {path} is virtual: its values are in other files", code="GC304"
        )
    if kind != h5py.h5d.CHUNKED and plist.get_external_count():
        raise FormatError(
            f"dataset {path} has external storage: its values are in other files", code="GC304"
        )
    if dataset.shape is None:
        raise FormatError(f"dataset {path} is empty: it has no shape", code="GC304")
    chunked = kind == h5py.h5d.CHUNKED
    dtype, strings = _dtype(file, dataset, path, chunked=chunked)
    inline = offset = None
    if kind == h5py.h5d.COMPACT:
        inline = _inline_values(dataset, strings, path)
    elif kind == h5py.h5d.CONTIGUOUS:
        # After a user block, the library returns an offset even for data that were never
        # written.
        offset = dataset.id.get_offset() if dataset.id.get_storage_size() else None
    return DatasetLayout(
        path=path,
        shape=tuple(dataset.shape),
        dtype=dtype,
        chunks=tuple(dataset.chunks) if chunked else None,
        offset=offset,
        has_chunks=chunked and bool(dataset.id.chunk_iter(lambda _: True)),
        inline_values=inline,
        fill=np.zeros((), dtype) if strings else _fill_value(plist, dtype),
        filters=_dataset_filters(plist),
        string_storage=strings,
        address_base=file.id.get_create_plist().get_userblock(),
        encoded_type=None if strings else _encoded_type(dataset, dtype),
        lacks_fill=plist.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED,
    )


def _dataset_filters(plist: Any) -> tuple[Filter, ...]:
    found = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return tuple((int(code), int(flags), tuple(values)) for code, flags, values, _ in found)


def _fill_value(plist: Any, dtype: np.dtype[Any]) -> Array:
    import h5py

    fill = np.zeros((), dtype)
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED:
        plist.get_fill_value(fill)
    return fill


def _inline_values(dataset: Any, strings: str | None, path: str) -> bytes:
    if strings == "heap":
        raise FormatError(
            f"dataset {path} has strings in a compact layout, which is not read", code="GC304"
        )
    return bytes(np.ascontiguousarray(dataset[()]).tobytes())


def _dtype(
    file: Any, dataset: Any, path: str, *, chunked: bool
) -> tuple[np.dtype[Any], str | None]:
    import h5py

    type_ = dataset.id.get_type()
    if isinstance(type_, h5py.h5t.TypeStringID):
        if type_.is_variable_str():
            if file.id.get_create_plist().get_sizes() != (8, 8):
                raise FormatError(
                    f"dataset {path}: strings with addresses of other than 8 bytes",
                    code="GC304",
                )
            return HEAP_ID, "heap"
        if type_.get_strpad() == h5py.h5t.STR_SPACEPAD:
            return np.dtype(f"S{type_.get_size()}"), "spaces"
        return np.dtype(f"S{type_.get_size()}"), "zeros"
    dtype: np.dtype[Any] = dataset.dtype
    known = _stored_as_numpy(type_, dtype) or (chunked and _is_padded_number(type_))
    if not is_numeric(dtype) or type_.get_size() != dtype.itemsize or not known:
        raise FormatError(
            f"dataset {path} has type {str(dtype)[:80]}; numbers, records of them and strings "
            "can be read",
            code="GC306",
        )
    return dtype, None


def _stored_as_numpy(type_: Any, dtype: np.dtype[Any]) -> bool:
    import h5py

    return bool(type_ == h5py.h5t.py_create(dtype, logical=True)) or bool(
        type_ == h5py.h5t.py_create(dtype)
    )


def _is_padded_number(type_: Any) -> bool:
    import h5py

    # Only these two classes, because h5py also returns, for example, an enumeration as an
    # integer.
    return type_.get_class() in (h5py.h5t.INTEGER, h5py.h5t.FLOAT)


def _encoded_type(dataset: Any, dtype: np.dtype[Any]) -> bytes | None:
    type_ = dataset.id.get_type()
    return None if _stored_as_numpy(type_, dtype) else bytes(type_.encode())


HEAP_ID = np.dtype([("length", "<u4"), ("heap", "<u8"), ("index", "<u4")])
"""The stored reference to a string of variable length."""


SHUFFLE, SCALE_OFFSET, BITSHUFFLE = 2, 6, 32008
_STEPS = {1: ZLIB, 3: FLETCHER32, 307: BZIP2, 32001: BLOSC, 32004: HDF5_LZ4, 32015: ZSTD}
LIBRARY_FILTERS = {4: "szip", 5: "n-bit", 6: "scale-offset", 32000: "lzf"}
# growcache decodes these, for which the library would load a plugin.
_PLUGINS_READ = {
    307: "bzip2", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd"
}  # fmt: skip
# Not decoded, because numcodecs has none of them.
PLUGIN_FILTERS = {
    32013: "zfp", 32014: "fpzip", 32017: "sz", 32018: "fci-decomp", 32019: "jpeg", 32022: "granular bitround",
    32023: "bitround", 32024: "sz3", 32026: "blosc2", 32028: "sperr",
}  # fmt: skip

_FILE_NUMBERS = itertools.count()  # of files in memory


def check_filters(layout: DatasetLayout, key: str) -> None:
    """Refuse filters that need a plugin. Plugins are never searched."""
    by_library = _is_decoded_by_library(layout)
    for code, _, _ in layout.filters:
        if by_library and code in _PLUGINS_READ:
            raise FormatError(
                f"{key}: dataset {layout.path} combines filter {code} ({_PLUGINS_READ[code]}) with "
                "one that only the HDF5 library reads; write it again with one of the two",
                code="GC304",
            )
        if code not in (SHUFFLE, BITSHUFFLE, *_STEPS, *LIBRARY_FILTERS):
            name = PLUGIN_FILTERS.get(code, "unknown")
            raise FormatError(
                f"{key}: dataset {layout.path} uses filter {code} ({name}), which is not read; "
                "write it again with gzip, zstd, lz4, blosc or bitshuffle (h5repack -f GZIP=4 OLD "
                "NEW, where the plugin is installed), or read it by a function of your own",
                code="GC304",
            )
        if code == SCALE_OFFSET and layout.lacks_fill:
            raise FormatError(
                f"{key}: dataset {layout.path} uses the scale-offset filter without a fill "
                "value, so its values cannot be decoded; write it again with a fill value",
                code="GC304",
            )


def _is_decoded_by_library(layout: DatasetLayout) -> bool:
    codes = (code for code, _, _ in layout.filters)
    return layout.encoded_type is not None or any(code in LIBRARY_FILTERS for code in codes)


def decode_chunk(
    data: memoryview, mask: int, layout: DatasetLayout, chunking: ChunkGrid
) -> Array:
    if _is_decoded_by_library(layout):
        return _decode_by_library(data, mask, layout, chunking)
    steps = [
        _step(code, values)
        for number, (code, _, values) in enumerate(layout.filters)
        if not mask >> number & 1
    ]
    found = decode_steps(data, steps, chunking.chunk_bytes)
    return np.frombuffer(found, chunking.dtype).reshape(chunking.chunks)


def _step(code: int, values: tuple[int, ...]) -> Step:
    if code == BITSHUFFLE:
        return bitshuffle_step(values)
    return shuffle_step(values[0] if values else 1) if code == SHUFFLE else _STEPS[code]


def _decode_by_library(
    data: memoryview, mask: int, layout: DatasetLayout, chunking: ChunkGrid
) -> Array:
    """Decode a chunk as the only one of a file in memory.

    In the original file, the library would trust the stored parameters of the filters.
    """
    try:
        with without_garbage_collection():
            return _decode_in_memory_file(bytes(data), mask, layout, chunking)
    except Exception as error:  # a damaged chunk can make the library raise anything
        raise FormatError(
            f"a chunk cannot be decoded: {' '.join(str(error).split())}", code="GC302"
        ) from error


def _decode_in_memory_file(
    data: bytes, mask: int, layout: DatasetLayout, chunking: ChunkGrid
) -> Array:
    import h5py

    found = np.empty(chunking.chunks, chunking.dtype)
    type_ = h5py.h5t.py_create(chunking.dtype, logical=True)
    if layout.encoded_type is not None:
        type_ = h5py.h5t.decode(layout.encoded_type)
    # HDF5 takes files with the same name for one file, which cannot be created twice.
    name = f"growcache chunk {next(_FILE_NUMBERS)}"
    with h5py.File(name, "w", driver="core", backing_store=False) as file:
        space = h5py.h5s.create_simple(chunking.chunks)
        plist = _creation_properties(mask, layout, chunking)
        dataset = h5py.h5d.create(file.id, b"x", type_, space, plist)
        dataset.write_direct_chunk((0,) * len(chunking.chunks), data)
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, found)
    return found


def _creation_properties(mask: int, layout: DatasetLayout, chunking: ChunkGrid) -> Any:
    """Return properties with the filters that were applied to the chunk.

    The library would ignore a mask of the other filters until the file is opened again.
    """
    import h5py

    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk(chunking.chunks)
    plist.set_fill_value(layout.fill)
    for number, (code, flags, values) in enumerate(layout.filters):
        if not mask >> number & 1:
            plist.set_filter(code, flags, values)
    return plist


LEAST_HEAP_BYTES = 4096  # size of the smallest heap
_HEAP_HEADER = struct.Struct("<4sB3xQ")
_HEAP_ITEM = struct.Struct("<HH4xQ")


async def read_strings(reader: ObjectReader, layout: DatasetLayout, values: Array) -> list[str]:
    flat = values.reshape(-1)
    if layout.string_storage == "heap":
        found = await _strings_from_heaps(reader, layout, flat)
    else:
        blank = b" " if layout.string_storage == "spaces" else b"\0"
        found = [bytes(value).rstrip(blank) for value in flat]
        if layout.string_storage == "zeros":
            found = [value.partition(b"\0")[0] for value in found]
    try:
        return [value.decode() for value in found]
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{reader.entry.key}: dataset {layout.path} has a string that is not valid UTF-8: "
            f"{error}",
            code="GC302",
        ) from None


async def _strings_from_heaps(
    reader: ObjectReader, layout: DatasetLayout, values: Array
) -> list[bytes]:
    key = reader.entry.key
    wanted = values["length"] > 0
    addresses = np.unique(values["heap"][wanted])
    places = [layout.address_base + int(address) for address in addresses]
    heaps = dict(zip(addresses.tolist(), await _read_heaps(reader, places), strict=True))
    found = []
    for length, heap, index in values.tolist():
        text = heaps[heap].get(index) if length else b""
        if text is None or len(text) < length:
            raise FormatError(
                f"{key}: dataset {layout.path} refers to a string that is missing", code="GC302"
            )
        found.append(bytes(text[:length]))
    return found


async def _read_heaps(
    reader: ObjectReader, places: Sequence[int]
) -> list[dict[int, memoryview]]:
    """Read the heaps at these places. Most share one request; large ones need a second."""
    size, key = reader.entry.size, reader.entry.key
    if any(place + _HEAP_HEADER.size > size for place in places):
        raise FormatError(f"{key}: a heap of strings ends beyond the file", code="GC302")
    heads = await read_ranges(reader, [(at, min(size, at + LEAST_HEAP_BYTES)) for at in places])
    sizes = [_heap_size(head, key) for head in heads]
    if any(at + n > size for at, n in zip(places, sizes, strict=True)) or (
        sum(sizes) > MOST_VISIT_BYTES
    ):
        raise FormatError(f"{key}: a heap of strings claims {max(sizes):,} bytes", code="GC302")
    large = [i for i, n in enumerate(sizes) if n > len(heads[i])]
    whole = await read_ranges(reader, [(places[i], places[i] + sizes[i]) for i in large])
    for i, data in zip(large, whole, strict=True):
        heads[i] = data
    return [_heap_items(data[:n]) for data, n in zip(heads, sizes, strict=True)]


def _heap_size(head: memoryview, key: str) -> int:
    magic, version, size = (
        _HEAP_HEADER.unpack_from(head) if len(head) >= _HEAP_HEADER.size else (b"", 0, 0)
    )
    if magic != b"GCOL" or version != 1:
        raise FormatError(f"{key}: expected a heap of strings, found {bytes(head[:4])!r}")
    return int(size)


def _heap_items(data: memoryview) -> dict[int, memoryview]:
    """Return the items of a heap by number. A damaged item ends the heap."""
    found: dict[int, memoryview] = {}
    at = _HEAP_HEADER.size
    while at + _HEAP_ITEM.size <= len(data):
        index, _, size = _HEAP_ITEM.unpack_from(data, at)
        at += _HEAP_ITEM.size
        if not index or at + size > len(data):
            break
        found[index] = data[at : at + size]
        at += -(-size // 8) * 8
    return found
