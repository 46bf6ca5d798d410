"""The arrays of Zarr groups that are fields of a sample, and the array whose chunks own the samples.

If the URL lists the chunks of several arrays, those of the largest own the samples, as in an
HDF5 file.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from growcache.errors import FormatError, ObjectMissingError
from growcache.formats.base import ObjectReader
from growcache.formats.grids import ArrayGrid
from growcache.formats.memory import SingleFlightCache
from growcache.formats.zarr_metadata import ZarrMetadata, read_json, zarr_metadata
from growcache.formats.zarr_sparse import VALUES, ZarrMatrices

MetadataOf: TypeAlias = Callable[[ObjectReader, str], Awaitable[ZarrMetadata]]
Roots: TypeAlias = dict[str, str]  # folders of arrays by field, owner first

KNOWN_GROUPS = 4096
MOST_ARRAYS = 1000  # of a group
_STORE_SUFFIX = ".zarr"
_NO_ARRAY = "growcache looks for others"  # not the name of any array


@runtime_checkable
class ListedReader(ObjectReader, Protocol):
    def is_named_by_url(self, key: str) -> bool:
        """Whether the source's URL names an object."""


@dataclass(frozen=True, slots=True)
class GroupArray:
    metadata: ZarrMetadata
    dimensions: tuple[str, ...]  # names; empty if the array has none

    @property
    def nbytes(self) -> int:
        return math.prod(self.metadata.shape) * self.metadata.dtype.itemsize


class GroupFields:
    def __init__(
        self,
        grid: ArrayGrid,
        datasets: Mapping[str, str] | None,
        name: str | None,
        metadata_of: MetadataOf,
        matrices: ZarrMatrices,
    ) -> None:
        self._grid = grid
        self._matrices = matrices
        self._datasets = datasets
        self._paths = {name: _inside(path) for name, path in (datasets or {}).items()}
        self._name = name
        self._metadata_of = metadata_of
        self._cached: Collection[str] | None = None
        self._groups: SingleFlightCache[str, dict[str, GroupArray]]
        self._groups = SingleFlightCache(KNOWN_GROUPS)
        self._roots: SingleFlightCache[str, Roots] = SingleFlightCache(KNOWN_GROUPS)
        self._names: SingleFlightCache[str, str] = SingleFlightCache(KNOWN_GROUPS)

    def follow(self, names: Collection[str]) -> None:
        """Keep to the fields of an existing cache."""
        self._cached = names
        self._roots = SingleFlightCache(KNOWN_GROUPS)
        self._names = SingleFlightCache(KNOWN_GROUPS)

    def may_mean(self, root: str) -> bool:
        """Whether an array may be a field, judged by its folder alone."""
        return self._datasets is None or _group_of(root, self._paths.values()) is not None

    async def has_others(self, reader: ObjectReader, root: str) -> bool:
        """Whether other arrays of the group, named by the URL, can be read."""
        folder, _, own = root.rstrip("/").rpartition("/")
        group = f"{folder}/" if folder else ""
        if self._datasets is not None or not own or not isinstance(reader, ListedReader):
            return False
        return bool(self._wanted(reader, group, await self._arrays(reader, group)))

    async def of(self, reader: ObjectReader, root: str, metadata: ZarrMetadata) -> Roots:
        """Return the fields of an array's samples, or none if the chunks of another array own them."""

        async def load() -> tuple[Roots, int]:
            if self._datasets is not None:
                return await self._of_datasets(reader, root), 1
            return await self._agreeing(reader, root, metadata), 1

        return await self._roots.get(root, load)

    async def _of_datasets(self, reader: ObjectReader, root: str) -> Roots:
        group = _group_of(root, self._paths.values())
        if group is None:
            return {}
        roots = {name: group + path for name, path in self._paths.items()}
        owners: dict[str, tuple[int, str]] = {}  # bytes and folder of the chunks, by field
        for name, folder in roots.items():
            chunks, metadata = await self._chunks_of(reader, folder)
            if chunks == root or _is_listed(reader, chunks, metadata):
                owners[name] = _nbytes(metadata), chunks
        if not owners:
            return {}
        owner = max(owners, key=lambda name: owners[name][0])
        return {owner: roots[owner], **roots} if owners[owner][1] == root else {}

    async def _chunks_of(self, reader: ObjectReader, folder: str) -> tuple[str, ZarrMetadata]:
        """Return the folder of the chunks that may own samples, and its metadata."""
        try:
            return folder, await self._metadata_of(reader, folder)
        except FormatError:
            matrix = await self._matrices.find(reader, folder)
            if matrix is None:
                raise
            return f"{folder}{VALUES}", matrix.data

    async def _agreeing(self, reader: ObjectReader, root: str, metadata: ZarrMetadata) -> Roots:
        """Return the arrays of the group with the length of the largest along the cut axes."""
        folder, _, own = root.rstrip("/").rpartition("/")
        group = f"{folder}/" if folder else ""
        arrays: Mapping[str, GroupArray] = {}
        if own and _lists_others(reader, group, metadata):
            arrays = await self._arrays(reader, group)
        if own not in arrays:
            return {await self.own_name(reader, root): root}
        chosen = agreeing_arrays(self._grid, self._wanted(reader, group, arrays))
        if not chosen or chosen[0] != own:
            return {}
        names = {one: one for one in chosen}
        if self._name is not None:
            names[own] = self._name
        return {names[one]: f"{group}{one}/" for one in chosen}

    def _wanted(
        self, reader: ObjectReader, group: str, arrays: Mapping[str, GroupArray]
    ) -> dict[str, GroupArray]:
        return {
            name: one
            for name, one in arrays.items()
            if (self._cached is None or self._name is not None or name in self._cached)
            and _is_listed(reader, f"{group}{name}/", one.metadata)
        }

    async def _arrays(self, reader: ObjectReader, group: str) -> dict[str, GroupArray]:
        async def load() -> tuple[dict[str, GroupArray], int]:
            return await _consolidated(reader, group), 1

        return await self._groups.get(group, load)

    async def own_name(self, reader: ObjectReader, root: str) -> str:
        """Return a field's name, which is ``x`` for an array without a group."""

        async def load() -> tuple[str, int]:
            return await self._found_name(reader, root), 1

        return await self._names.get(root, load)

    async def _found_name(self, reader: ObjectReader, root: str) -> str:
        if self._name is not None:
            return self._name
        folder, _, own = root.rstrip("/").rpartition("/")
        if self._cached is not None and "x" not in self._cached:
            return own or "x"
        if not own or own.lower().endswith(_STORE_SUFFIX):
            return "x"
        if any(part.lower().endswith(_STORE_SUFFIX) for part in folder.split("/")):
            return own
        return own if await _is_group(reader, f"{folder}/" if folder else "") else "x"


def agreeing_arrays(grid: ArrayGrid, arrays: Mapping[str, GroupArray]) -> list[str]:
    """Return the names of arrays that agree along the cut axes, largest first.

    Named dimensions must agree in their names, too, because a coordinate of another dimension
    may be as long by chance.
    """
    cuts: dict[str, tuple[list[int], tuple[str, ...]]] = {}
    for name, one in arrays.items():
        with suppress(FormatError):  # it has fewer axes
            samples = grid.on(one.metadata.shape, name)
            named = tuple(one.dimensions[at] for at in samples.cut_axes if one.dimensions)
            cuts[name] = samples.cut_sizes, named
    if not cuts:
        return []
    largest = max(sorted(cuts), key=lambda name: arrays[name].nbytes)
    sizes, named = cuts[largest]
    others = [
        name
        for name, (own_sizes, own_named) in sorted(cuts.items())
        if name != largest
        and own_sizes == sizes
        and (own_named == named or not own_named or not named)
    ]
    return [largest, *others]


def _nbytes(metadata: ZarrMetadata) -> int:
    return math.prod(metadata.shape) * metadata.dtype.itemsize


def _inside(path: str) -> str:
    """Return a folder inside the group, wherever ``path`` points."""
    return "".join(f"{part}/" for part in path.split("/") if part not in ("", ".", ".."))


def _group_of(root: str, paths: Iterable[str]) -> str | None:
    """Return the folder that contains an array, or a matrix, named by ``paths``."""
    for path in paths:
        for end in (path, path + VALUES):
            if root == end or root.endswith("/" + end):
                return root.removesuffix(end)
    return None


def _is_listed(reader: ObjectReader, root: str, metadata: ZarrMetadata) -> bool:
    key = root + metadata.name((0,) * len(metadata.shape))
    return isinstance(reader, ListedReader) and reader.is_named_by_url(key)


def _lists_others(reader: ObjectReader, group: str, metadata: ZarrMetadata) -> bool:
    return _is_listed(reader, f"{group}{_NO_ARRAY}/", metadata)


async def _is_group(reader: ObjectReader, folder: str) -> bool:
    for file in ("zarr.json", ".zgroup"):
        with suppress(ObjectMissingError):
            await reader.find(folder + file)
            return True
    return False


async def _consolidated(reader: ObjectReader, group: str) -> dict[str, GroupArray]:
    """Return the arrays in a group's consolidated metadata, or none without such metadata."""
    for file, parse in (("zarr.json", _arrays_3), (".zmetadata", _arrays_2)):
        with suppress(ObjectMissingError):
            found = await read_json(await reader.find(group + file))
            return parse(found)
    return {}


def _arrays_3(found: Any) -> dict[str, GroupArray]:
    held = found.get("consolidated_metadata") if isinstance(found, Mapping) else None
    documents = held.get("metadata") if isinstance(held, Mapping) else None
    return _group_arrays(
        (path, one, 3, one.get("dimension_names") if isinstance(one, Mapping) else None)
        for path, one in _items(documents)
    )


def _arrays_2(found: Any) -> dict[str, GroupArray]:
    documents = dict(_items(found.get("metadata") if isinstance(found, Mapping) else None))
    attributes = {path.removesuffix("/.zattrs"): one for path, one in documents.items()}
    return _group_arrays(
        (path.removesuffix("/.zarray"), one, 2, _dimensions_2(attributes, path))
        for path, one in documents.items()
        if path.endswith("/.zarray")
    )


def _dimensions_2(attributes: Mapping[str, Any], path: str) -> Any:
    found = attributes.get(path.removesuffix("/.zarray"))
    return found.get("_ARRAY_DIMENSIONS") if isinstance(found, Mapping) else None


def _items(documents: Any) -> Iterable[tuple[str, Any]]:
    return documents.items() if isinstance(documents, Mapping) else ()


def _group_arrays(
    documents: Iterable[tuple[str, Any, int, Any]],
) -> dict[str, GroupArray]:
    """Return the arrays of the group that can be read."""
    found: dict[str, GroupArray] = {}
    for path, document, version, dimensions in documents:
        if "/" in path or not path or len(found) >= MOST_ARRAYS:
            continue
        with suppress(FormatError):
            metadata = zarr_metadata(document, version)
            found[path] = GroupArray(metadata, _dimensions(dimensions, metadata.shape))
    return found


def _dimensions(names: Any, shape: Sequence[int]) -> tuple[str, ...]:
    if isinstance(names, list) and len(names) == len(shape):
        return tuple(map(str, names)) if all(isinstance(name, str) for name in names) else ()
    return ()
