"""Zarr versions 2 and 3: rows or windows of an array whose chunks are the listed objects.

A chunk owns the windows that start in it. Listed objects that are not chunks own none.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    RUN_LENGTH_RATIO,
    Measure,
    ObjectFormat,
    ObjectReader,
    Visit,
    choice_option,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.chunks import (
    ChunkPlace,
    CutFields,
    FieldArray,
    array_paths_option,
    choose_ordinals,
)
from growcache.formats.contiguous import refuse_differing_sizes
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, Samples, grid_option
from growcache.formats.memory import SingleFlightCache
from growcache.formats.scales import (
    CHANNEL_AXIS,
    CHANNEL_CONVERSION,
    Scale,
    array_scale,
    has_nwb_conversion,
    scale_advice,
    scale_option,
)
from growcache.formats.sparse_rows import refuse_other_axes, sparse_option
from growcache.formats.zarr_field import ZarrField
from growcache.formats.zarr_group import GroupFields, Roots
from growcache.formats.zarr_metadata import (
    ZarrMetadata,
    metadata_or_error,
    possible_places,
    read_attributes,
)
from growcache.formats.zarr_sparse import ZarrMatrices
from growcache.formats.zarr_unwritten import ChunkCensus
from growcache.schema import Array, Sample

_OPTIONS = (*GRID_OPTIONS, "datasets", "beside", "name", "scale", "sparse", "unwritten")
_KNOWN_ARRAYS = 4096  # arrays whose metadata is kept


Located: TypeAlias = tuple[str, ZarrMetadata, ChunkPlace]


class ZarrFormat(ObjectFormat):
    def __init__(
        self,
        grid: ArrayGrid,
        beside: Mapping[str, str] | None,
        datasets: Mapping[str, str] | None,
        name: str | None,
        scale: str | None,
        *,
        draws_unwritten: bool,
        ragged: bool,
    ) -> None:
        self._grid = grid
        self._beside = beside
        self._matrices = ZarrMatrices(self._metadata)
        self._group = GroupFields(grid, datasets, name, self._metadata, self._matrices)
        self._ragged = ragged
        self._scale = scale
        self._draws_unwritten = draws_unwritten
        self._known: SingleFlightCache[str, ZarrMetadata | FormatError] = SingleFlightCache(
            _KNOWN_ARRAYS
        )
        self._scales: SingleFlightCache[str, tuple[Scale | None]] = SingleFlightCache(
            _KNOWN_ARRAYS
        )

    def census(self) -> ChunkCensus | None:
        """Return an object that finds the chunks which a listing cannot show, or None."""
        return ChunkCensus(self._grid, self._owner) if self._draws_unwritten else None

    def follow_fields(self, names: Collection[str]) -> None:
        self._group.follow(names)

    async def _owner(self, reader: ObjectReader, root: str) -> ZarrMetadata:
        if not self._group.may_mean(root):
            raise FormatError(
                f"{root or '/'}: source.options.datasets does not name it", code="GC303"
            )
        metadata = await self._metadata(reader, root)
        if not await self._roots(reader, root, metadata):
            raise FormatError(f"{root or '/'}: the chunks of another array own its samples")
        return metadata

    async def _roots(self, reader: ObjectReader, root: str, metadata: ZarrMetadata) -> Roots:
        """Return the folders of the arrays that are fields, by field name."""
        if self._beside is None:
            return await self._group.of(reader, root, metadata)
        group = root.rstrip("/").rpartition("/")[0]
        others = {name: _sibling_folder(group, path) for name, path in self._beside.items()}
        return {await self._group.own_name(reader, root): root, **others}

    async def measure(self, reader: ObjectReader) -> Measure:
        located = await self._located(reader)
        if located is None or not await self._roots(reader, *located[:2]):
            return Measure(max(1.0, float(reader.entry.size)), 0, 0)
        owned = await self._owned(reader, located, Visit(0, 1, 0, 0), at_random=False)
        count = len(owned)
        size = max(1.0, reader.entry.size / max(1, count))
        return Measure(size, 0, count, empty=owned.too_short())

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        located = await self._located(reader)
        if located is None:
            return []
        root, metadata, _ = located
        roots = await self._roots(reader, root, metadata)
        if not roots:
            return []
        owned = await self._owned(reader, located, visit)
        fields: list[FieldArray] = []
        cuts: dict[str, Samples] = {}
        for name, folder in roots.items():
            one = await self._field_at(name, folder, reader)
            fields.append(one)
            cuts[name] = owned.of_array(self._grid.on(one.shape, folder))
        cut = CutFields(fields, cuts, reader.entry, RUN_LENGTH_RATIO)
        refuse_differing_sizes(cuts, reader.entry.key)
        whole = range(len(owned))
        wanted = choose_ordinals(len(owned), visit, reader.entry.key, lambda _: whole)
        return await cut.read(wanted)

    async def _owned(
        self, reader: ObjectReader, located: Located, visit: Visit, *, at_random: bool = True
    ) -> Samples:
        """Return the samples that start in a chunk."""
        root, metadata, place = located
        grid = self._grid if at_random else self._grid.without_phase()
        matrix = await self._matrices.of_values(reader, root)
        if matrix is None:
            return _owned_samples(grid.on(metadata.shape, root, visit, root), metadata, place)
        refuse_other_axes(grid.on(matrix.shape, root).cut_axes, root)
        samples = grid.on(matrix.shape, root, visit, root)
        rows = await self._matrices.rows_of_chunk(reader, matrix, place[0])
        return replace(samples, starts=(_within(samples.starts[0], rows), samples.starts[1]))

    async def _field_at(self, name: str, folder: str, reader: ObjectReader) -> FieldArray:
        matrix = await self._matrices.at(reader, folder)
        if matrix is not None:
            return self._matrices.field(name, matrix, reader, ragged=self._ragged)
        return await self._field(name, folder, await self._metadata(reader, folder), reader)

    async def advice(self, reader: ObjectReader) -> str:
        located = await self._located(reader)
        if self._scale is not None or located is None:
            return ""
        for folder in (await self._roots(reader, *located[:2])).values():
            if await self._matrices.at(reader, folder) is not None:
                continue
            metadata = await self._metadata(reader, folder)
            attributes = await read_attributes(reader, folder, metadata)
            if not metadata.fill:  # Zarr writes 0 if no fill value was chosen
                attributes.pop("_FillValue", None)
            said = scale_advice(f"array {folder or '/'}", metadata.dtype, attributes)
            if said:
                return said
        return ""

    async def _field(
        self, name: str, root: str, metadata: ZarrMetadata, reader: ObjectReader
    ) -> ZarrField:
        scale: Scale | None = None
        if self._scale == "cf":
            load = functools.partial(self._load_scale, reader, root, metadata)
            (scale,) = await self._scales.get(root, load)
        return ZarrField(name, root, metadata, reader, scale)

    async def _load_scale(
        self, reader: ObjectReader, root: str, metadata: ZarrMetadata
    ) -> tuple[tuple[Scale | None], int]:
        attributes = await read_attributes(reader, root, metadata)
        channels = None
        if has_nwb_conversion(attributes):
            channels = await self._channel_factors(reader, root, metadata)
        try:
            return (array_scale(metadata.dtype, attributes, channels),), 1
        except FormatError as error:
            raise FormatError(f"{root or '/'}: {error}", code=error.code) from None

    async def _channel_factors(
        self, reader: ObjectReader, root: str, metadata: ZarrMetadata
    ) -> Array | None:
        path = _sibling_folder(root.rstrip("/").rpartition("/")[0], CHANNEL_CONVERSION)
        try:
            found = await self._metadata(reader, path)
        except FormatError:
            return None
        if found.shape != metadata.shape[CHANNEL_AXIS:][:1]:
            raise FormatError(
                f"{path}: expected a number for each of the channels of {list(metadata.shape)}, "
                f"found {list(found.shape)}"
            )
        field = ZarrField(CHANNEL_CONVERSION, path, found, reader)
        (values,) = await field.stored([(range(found.shape[0]),)])
        return np.asarray(values, np.float64)

    async def array_of(self, reader: ObjectReader) -> tuple[str, ZarrMetadata] | None:
        located = await self._located(reader)
        return None if located is None else located[:2]

    async def _located(
        self, reader: ObjectReader
    ) -> tuple[str, ZarrMetadata, ChunkPlace] | None:
        """Return the array of a chunk and its place there, or None if the key is not a chunk."""
        key = reader.entry.key
        problem: FormatError | None = None
        for root, place in possible_places(key):
            if not self._group.may_mean(root):
                continue
            try:
                metadata = await self._metadata(reader, root)
            except FormatError as error:
                if not await self._passes_over(reader, root):
                    problem = problem or error
                continue
            if len(place) == len(metadata.shape) and root + metadata.name(place) == key:
                return root, metadata, place
        if problem is not None:
            raise problem
        return None

    async def _passes_over(self, reader: ObjectReader, root: str) -> bool:
        """Whether others own the samples of a group in which an array cannot be read."""
        return self._beside is None and await self._group.has_others(reader, root)

    async def _metadata(self, reader: ObjectReader, root: str) -> ZarrMetadata:
        known = await self._known.get(root, lambda: metadata_or_error(reader, root))
        if isinstance(known, FormatError):
            raise known
        return known


def _owned_samples(samples: Samples, metadata: ZarrMetadata, place: ChunkPlace) -> Samples:
    """Return the samples that start in a chunk.

    Along axes that are not cut, the first chunk owns them.
    """
    starts = [
        _starts_in(starts, number, chunk) if grid is not None else range(number == 0)
        for starts, grid, number, chunk in zip(
            samples.starts, samples.axes, place, metadata.chunks, strict=True
        )
    ]
    return replace(samples, starts=tuple(starts))


def _starts_in(starts: range, number: int, chunk: int) -> range:
    return _within(starts, range(number * chunk, (number + 1) * chunk))


def _within(starts: range, values: range) -> range:
    first = -(-(values.start - starts.start) // starts.step)
    stop = -(-(values.stop - starts.start) // starts.step)
    return starts[max(0, first) : max(0, stop)]


def _sibling_folder(root: str, path: str) -> str:
    """Return a folder inside ``root``, wherever ``path`` points."""
    inside = "/".join(part for part in path.split("/") if part not in ("", ".", ".."))
    return f"{root}/{inside}/" if root else f"{inside}/"


def open_zarr(options: Mapping[str, Any]) -> ZarrFormat:
    refuse_unknown_options("zarr", options, _OPTIONS)
    grid = grid_option(options)
    if grid is None:
        raise ConfigError(
            "source.options: format zarr needs window, or axis: 0 for single rows", code="GC103"
        )
    beside = array_paths_option(options, "beside")
    datasets = array_paths_option(options, "datasets")
    name = _name_option(options, datasets)
    if beside is not None and datasets is not None:
        raise ConfigError(
            "source.options.beside: datasets names all arrays, so leave out one of the two",
            code="GC103",
        )
    ragged = sparse_option(options)
    if ragged and any(cut.window for _, cut in grid.cuts):
        raise ConfigError(
            "source.options.sparse: ragged rows are single ones; use axis: 0", code="GC103"
        )
    unwritten = choice_option(options, "unwritten", ("fill", "skip"), "fill")
    require_library("source.format: zarr", "numcodecs", "zarr")
    return ZarrFormat(
        grid,
        beside,
        datasets,
        name,
        scale_option(options),
        draws_unwritten=unwritten == "fill",
        ragged=ragged,
    )


def _name_option(options: Mapping[str, Any], datasets: Mapping[str, str] | None) -> str | None:
    name = options.get("name")
    if name is None:
        return None
    if not isinstance(name, str) or not name or datasets is not None:
        raise ConfigError(
            "source.options.name: expected the name of the field, and no datasets, which give "
            f"names themselves; found {name!r}",
            code="GC103",
        )
    return name
