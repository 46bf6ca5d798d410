"""What an HDF5 file says about a dataset: where its values lie and how they are stored.

Nothing beside the file is ever opened: external and user-defined links, external storage and
virtual datasets are refused, and so is what only the library could read (references, lists of
any length but strings).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from growcache.errors import FormatError
from growcache.remote.formats.windows import is_numeric
from growcache.schema import Array

MOST_LINKS = 64  # from the root to a dataset, soft ones included
MOST_NAMED = 8  # datasets that an error names
MOST_LOOKED = 1000  # names in a file, for a list of its datasets
SHOWN_NAME = 40

Filter = tuple[int, int, tuple[int, ...]]
"""Number, flags, and values."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of one dataset.

    Attributes:
        path: in the file.
        shape: of the array; () of a single value.
        dtype: of a value as stored; of strings what stands for one.
        chunks: shape of a chunk; None where values lie in one piece.
        offset: of that piece; None where it was never written.
        written: whether any chunk was.
        inline: the values themselves, where the header holds them.
        fill: value of what was never written.
        filters: that chunks went through, in order.
        strings: how those are stored, if it holds any.
        base: what addresses in the file count from.
        few_bits: the type of numbers that do not fill their bytes, as HDF5 encodes types; None:
            values are stored as NumPy has them.
        no_fill: whether the file says that there is no fill value.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None
    offset: int | None
    written: bool
    inline: bytes | None
    fill: Array
    filters: tuple[Filter, ...]
    strings: str | None
    base: int
    few_bits: bytes | None = None
    no_fill: bool = False


def names_at_root(file: Any, key: str) -> list[str]:
    """Return the names of the datasets at the root; only links within the file count.

    Raises:
        FormatError: too many to look at.
    """
    import h5py

    if len(file) > 1000:
        raise FormatError(f"{key}: {len(file)} names at its root; set source.options.datasets")
    return [
        name
        for name in file
        if isinstance(file.get(name, getlink=True), h5py.HardLink)
        # To ask for its class would go through all of the index of its chunks.
        and isinstance(h5py.h5o.open(file.id, name.encode()), h5py.h5d.DatasetID)
    ]


def dataset_paths(file: Any) -> list[str]:
    """Return the paths of datasets, those next to the root first, as far as a look shows them."""
    import h5py

    found: list[str] = []
    groups, looked = [("", file["/"])], 0
    for folder, group in groups:  # which grows meanwhile
        for name in group:
            looked += 1
            if looked > MOST_LOOKED:
                return found
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                continue
            kind = group.get(name, getclass=True)
            if kind is h5py.Dataset:
                found.append(folder + name)
            elif kind is h5py.Group:
                groups.append((f"{folder}{name}/", group[name]))
    return found


def dataset_at(file: Any, path: str) -> Any:
    """Return a dataset of the file itself, links followed one by one.

    Raises:
        FormatError: there is none, or a link leads out of the file.
    """
    import h5py

    at, left = file["/"], _parts(path)
    for _ in range(MOST_LINKS):
        if not left:
            break
        name = left.pop(0)
        link = at.get(name, getlink=True) if isinstance(at, h5py.Group) else None
        if isinstance(link, h5py.SoftLink):
            target = link.path
            at = file["/"] if target.startswith("/") else at
            left = _parts(target) + left
        elif isinstance(link, h5py.HardLink):
            at = h5py.h5o.open(at.id, name.encode())
            at = h5py.Dataset(at) if isinstance(at, h5py.h5d.DatasetID) else _group(at, path)
        elif link is not None:
            raise FormatError(
                f"a link out of the file at {path!r:.{SHOWN_NAME}}, never followed"
            )
        else:
            raise FormatError(_no_dataset(file, path))
    if left or not isinstance(at, h5py.Dataset):
        raise FormatError(_no_dataset(file, path))
    return at


def _group(found: Any, path: str) -> Any:
    import h5py

    if isinstance(found, h5py.h5g.GroupID):
        return h5py.Group(found)
    raise FormatError(f"no dataset at {path!r:.{SHOWN_NAME}}")


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _no_dataset(file: Any, path: str) -> str:
    names = ", ".join(f"{name!r:.{SHOWN_NAME}}" for name in list(file)[:MOST_NAMED])
    return f"no dataset at {path!r:.{SHOWN_NAME}}; at the root are {names or 'none'}"


def describe(file: Any, path: str, key: str) -> Layout:
    """Return the layout of a dataset.

    Raises:
        FormatError: there is none, or it cannot be read.
    """
    try:
        return _described(file, dataset_at(file, path), path)
    except FormatError as error:
        raise FormatError(f"{key}: {error}") from None


def _described(file: Any, dataset: Any, path: str) -> Layout:
    import h5py

    plist = dataset.id.get_create_plist()
    kind = plist.get_layout()
    if kind == h5py.h5d.VIRTUAL:
        raise FormatError(f"dataset {path} is virtual: its values are in other files")
    if kind != h5py.h5d.CHUNKED and plist.get_external_count():
        raise FormatError(f"dataset {path} has external storage: its values are in other files")
    if dataset.shape is None:
        raise FormatError(f"dataset {path} is empty: it has no shape")
    chunked = kind == h5py.h5d.CHUNKED
    dtype, strings = _dtype(file, dataset, path, chunked=chunked)
    inline = offset = None
    if kind == h5py.h5d.COMPACT:
        inline = _inline(dataset, strings, path)
    elif kind == h5py.h5d.CONTIGUOUS:
        # Behind a user block the library has an offset for what was never written, too.
        offset = dataset.id.get_offset() if dataset.id.get_storage_size() else None
    return Layout(
        path=path,
        shape=tuple(dataset.shape),
        dtype=dtype,
        chunks=tuple(dataset.chunks) if chunked else None,
        offset=offset,
        written=chunked and bool(dataset.id.chunk_iter(lambda _: True)),
        inline=inline,
        fill=np.zeros((), dtype) if strings else _fill(plist, dtype),
        filters=_filters(plist),
        strings=strings,
        base=file.id.get_create_plist().get_userblock(),
        few_bits=None if strings else _few_bits(dataset, dtype),
        no_fill=plist.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED,
    )


def _filters(plist: Any) -> tuple[Filter, ...]:
    found = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return tuple((int(code), int(flags), tuple(values)) for code, flags, values, _ in found)


def _fill(plist: Any, dtype: np.dtype[Any]) -> Array:
    import h5py

    fill = np.zeros((), dtype)
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_UNDEFINED:
        plist.get_fill_value(fill)
    return fill


def _inline(dataset: Any, strings: str | None, path: str) -> bytes:
    if strings == "heap":
        raise FormatError(f"dataset {path} has strings in a compact layout, which is not read")
    return bytes(np.ascontiguousarray(dataset[()]).tobytes())


def _dtype(
    file: Any, dataset: Any, path: str, *, chunked: bool
) -> tuple[np.dtype[Any], str | None]:
    """Return the dtype of the values, and how strings are stored."""
    import h5py

    type_ = dataset.id.get_type()
    if isinstance(type_, h5py.h5t.TypeStringID):
        if type_.is_variable_str():
            if file.id.get_create_plist().get_sizes() != (8, 8):
                raise FormatError(
                    f"dataset {path}: strings with addresses of other than 8 bytes"
                )
            return HEAP_ID, "heap"
        if type_.get_strpad() == h5py.h5t.STR_SPACEPAD:
            return np.dtype(f"S{type_.get_size()}"), "spaces"
        return np.dtype(f"S{type_.get_size()}"), "zeros"
    dtype: np.dtype[Any] = dataset.dtype
    known = _same(type_, dtype) or (chunked and _is_padded_number(type_))
    if not is_numeric(dtype) or type_.get_size() != dtype.itemsize or not known:
        raise FormatError(
            f"dataset {path} has type {str(dtype)[:80]}; numbers, records of them and strings "
            "can be read"
        )
    return dtype, None


def _same(type_: Any, dtype: np.dtype[Any]) -> bool:
    """Whether the stored bytes are what NumPy takes them for."""
    import h5py

    return bool(type_ == h5py.h5t.py_create(dtype, logical=True)) or bool(
        type_ == h5py.h5t.py_create(dtype)
    )


def _is_padded_number(type_: Any) -> bool:
    """Whether values are plain numbers, of which the library knows which bits count."""
    import h5py

    # Only these two classes: an enumeration, for instance, is an integer to h5py, too.
    return type_.get_class() in (h5py.h5t.INTEGER, h5py.h5t.FLOAT)


def _few_bits(dataset: Any, dtype: np.dtype[Any]) -> bytes | None:
    type_ = dataset.id.get_type()
    return None if _same(type_, dtype) else bytes(type_.encode())


HEAP_ID = np.dtype([("length", "<u4"), ("heap", "<u8"), ("index", "<u4")])
"""What stands for a string of any length."""
