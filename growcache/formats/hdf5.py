"""HDF5: rows or windows along the first axis of datasets, read by byte range and chunk."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    choice_option,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.chunks import (
    CutFields,
    array_paths_option,
    measure_fields,
    refuse_large_visit,
)
from growcache.formats.grids import GRID_OPTIONS, ArrayGrid, grid_option
from growcache.formats.hdf5_dataset import (
    DatasetLayout,
    check_filters,
    dataset_advice,
    describe_dataset,
)
from growcache.formats.hdf5_field import DatasetField, whole_fields
from growcache.formats.hdf5_file import HDF5Files
from growcache.formats.hdf5_groups import HDF5GroupsFormat, group_option
from growcache.formats.hdf5_paths import names_at_root
from growcache.formats.hdf5_sparse import SparseField, SparseLayout, describe_sparse
from growcache.formats.memory import LruCache, refuse_large_sample
from growcache.formats.scales import scale_option
from growcache.formats.sparse_rows import refuse_other_axes, sparse_option
from growcache.schema import Sample
from growcache.store.contract import Entry

_OPTIONS = ("datasets", "group", "scale", "sparse", "text", *GRID_OPTIONS)
_KNOWN_LAYOUTS = 4096  # objects; some kB each
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


Layouts: TypeAlias = Mapping[str, DatasetLayout]


class _FieldsOfFiles:
    """The datasets of each file: the named ones, or those at the root that ``belong``."""

    def __init__(
        self,
        named: Mapping[str, str] | None,
        belong: Callable[[Layouts], Sequence[str]],
        scale: str | None,
        *,
        ragged: bool = False,
    ) -> None:
        self._named = named
        self._belong = belong
        self._scale = scale
        self._ragged = ragged
        self._files = HDF5Files()
        self._known: LruCache[Entry, tuple[tuple[str, DatasetLayout | SparseLayout], ...]]
        self._known = LruCache(_KNOWN_LAYOUTS)

    async def get(self, reader: ObjectReader) -> list[DatasetField | SparseField]:
        entry = reader.entry
        file = self._files.get(entry)
        found = self._known.get(entry)
        if found is None:
            found = await file.call(reader, lambda opened: self._described(opened, entry))
            self._known.put(entry, found, 1)
        return [
            DatasetField(name, layout, reader, file)
            if isinstance(layout, DatasetLayout)
            else SparseField(name, layout, reader, file, ragged=self._ragged)
            for name, layout in found
        ]

    async def advice(self, reader: ObjectReader) -> str:
        """Return advice if values have a scale and the configuration does not say how to apply it."""
        if self._scale is not None:
            return ""
        fields = await self.get(reader)
        paths = [one.layout.path for one in fields if isinstance(one, DatasetField)]
        file = self._files.get(reader.entry)
        return await file.call(
            reader,
            lambda opened: next(
                filter(None, (dataset_advice(opened, path) for path in paths)), ""
            ),
        )

    def _layout(self, file: Any, path: str, key: str) -> DatasetLayout:
        return describe_dataset(file, path, key, scaled=self._scale == "cf")

    def _described(
        self, file: Any, entry: Entry
    ) -> tuple[tuple[str, DatasetLayout | SparseLayout], ...]:
        if self._named:
            return tuple(
                (name, self._described_at(file, path, entry.key))
                for name, path in self._named.items()
            )
        found = self._found(file, entry.key)
        for layout in found.values():
            check_filters(layout, entry.key)
        return tuple(found.items())

    def _described_at(self, file: Any, path: str, key: str) -> DatasetLayout | SparseLayout:
        sparse = describe_sparse(file, path, key)
        if sparse is not None:
            return sparse
        layout = self._layout(file, path, key)
        check_filters(layout, key)
        return layout

    def _found(self, file: Any, key: str) -> dict[str, DatasetLayout]:
        names = names_at_root(file, key)
        if len(names) == 1:
            return {names[0]: self._layout(file, names[0], key)}
        found, refused = {}, None
        for name in names:
            try:
                found[name] = self._layout(file, name, key)
            except FormatError as error:
                refused = error
        chosen = self._belong(found)
        if not chosen:
            shown = ", ".join(f"{name!r:.40}" for name in names[:8]) or "none"
            raise refused or FormatError(
                f"{key}: expected one dataset at its root, found {shown}; name those that are "
                "meant in source.options.datasets",
                code="GC303",
            )
        return {name: found[name] for name in chosen}


class HDF5WholeFormat(ObjectFormat):
    def __init__(self, named: Mapping[str, str] | None, scale: str | None = None) -> None:
        self._datasets = _FieldsOfFiles(named, lambda found: (), scale)

    async def advice(self, reader: ObjectReader) -> str:
        return await self._datasets.advice(reader)

    async def measure(self, reader: ObjectReader) -> Measure:
        await self._datasets.get(reader)
        return Measure(float(reader.entry.size), 0, 1)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        found = await self._datasets.get(reader)
        nbytes = sum(one.nbytes for one in found)
        refuse_large_visit(reader.entry, nbytes)
        refuse_large_sample(nbytes, reader.entry.key)
        read = await asyncio.gather(
            *(one.boxes([tuple(map(range, one.shape))]) for one in found)
        )
        sample: Sample = {}
        for one, (values,) in zip(found, read, strict=True):
            sample |= whole_fields(one.name, one.layout, values, reader.entry.key)
        longest = max((one.shape[0] for one in found if one.layout.shape), default=0)
        return [(sample, 0, longest or max(1, reader.entry.size))]


class HDF5WindowsFormat(ObjectFormat):
    ranged = header_first = says_ordinals = True

    def __init__(
        self,
        named: Mapping[str, str] | None,
        grid: ArrayGrid,
        scale: str | None = None,
        text: str | None = None,
        *,
        ragged: bool = False,
    ) -> None:
        self._datasets = _FieldsOfFiles(named, self._of_one_length, scale, ragged=ragged)
        self._grid = grid
        self._text = text

    async def advice(self, reader: ObjectReader) -> str:
        return await self._datasets.advice(reader)

    async def measure(self, reader: ObjectReader) -> Measure:
        return measure_fields(await self._cut(reader))

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        cut = await self._cut(reader, visit)
        return await cut.read(cut.wanted(visit))

    async def ordinals(self, reader: ObjectReader, visit: Visit) -> Sequence[int]:
        return sorted((await self._cut(reader, visit)).wanted(visit))

    async def _cut(self, reader: ObjectReader, visit: Visit | None = None) -> CutFields:
        found = await self._datasets.get(reader)
        for one in found:
            self._check(one, reader.entry.key)
        return CutFields.of(found, self._grid, reader.entry, visit)

    def _of_one_length(self, found: Layouts) -> list[str]:
        """Return the datasets with the length of the largest one along the cut axes."""
        sizes = {}
        for name, layout in found.items():
            if layout.shape and not self._is_dropped(layout):
                with suppress(FormatError):  # it has fewer axes
                    sizes[name] = self._grid.on(layout.shape, name).cut_sizes
        largest = max(
            sizes,
            key=lambda name: math.prod(found[name].shape) * found[name].dtype.itemsize,
            default="",
        )
        return [name for name, size in sizes.items() if size == sizes[largest]]

    def _is_dropped(self, layout: DatasetLayout) -> bool:
        if self._text == "drop":
            return layout.string_storage is not None
        return self._text is None and self._are_lists_of_strings(layout)

    def _are_lists_of_strings(self, layout: DatasetLayout) -> bool:
        (_, first), *others = self._grid.cuts
        several = bool(others or first.window or len(layout.shape) > 1)
        return several and layout.string_storage is not None

    def _check(self, one: DatasetField | SparseField, key: str) -> None:
        if isinstance(one, SparseField):
            cut = self._grid.on(one.shape, f"{key}: {one.layout.path}").cut_axes
            refuse_other_axes(cut, f"{key}: {one.layout.path}")
            return
        layout = one.layout
        if not layout.shape:
            raise FormatError(
                f"{key}: dataset {layout.path} is a single value, without an axis 0",
                code="GC303",
            )
        if self._are_lists_of_strings(layout):
            raise FormatError(
                f"{key}: dataset {layout.path} holds strings, but a sample can have only one; "
                "use axis: 0, or leave them out with text: drop",
                code="GC303",
            )


def open_hdf5(
    options: Mapping[str, Any],
) -> HDF5WholeFormat | HDF5WindowsFormat | HDF5GroupsFormat:
    refuse_unknown_options("hdf5", options, _OPTIONS)
    named = array_paths_option(options, "datasets")
    grid, scale = grid_option(options), scale_option(options)
    parent, text = group_option(options), _text_option(options)
    require_library("source.format: hdf5", "h5py", "hdf5")
    require_library("source.format: hdf5", "numcodecs", "hdf5")
    if parent is not None:
        if grid is not None:
            raise ConfigError(
                "source.options.group: each group is a sample as a whole, so leave out axis and "
                "window",
                code="GC103",
            )
        return HDF5GroupsFormat(parent, named, scale, text)
    if grid is None:
        return HDF5WholeFormat(named, scale)
    ragged = sparse_option(options)
    if ragged and any(cut.window for _, cut in grid.cuts):
        raise ConfigError(
            "source.options.sparse: ragged rows are single ones; use axis: 0", code="GC103"
        )
    return HDF5WindowsFormat(named, grid, scale, text, ragged=ragged)


def _text_option(options: Mapping[str, Any]) -> str | None:
    if options.get("text") is None:
        return None
    return choice_option(options, "text", ("keep", "drop"), "keep")
