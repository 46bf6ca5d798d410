"""HDF5 files in which each group is a sample and its datasets are the fields."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    SMALL_OBJECT_BYTES,
    Measure,
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    ordinals_of_part,
    refuse_many_samples,
    take_some,
)
from growcache.formats.chunks import refuse_large_visit
from growcache.formats.hdf5_dataset import (
    DatasetLayout,
    check_filters,
    dataset_advice,
    describe_dataset,
)
from growcache.formats.hdf5_field import DatasetField, whole_fields
from growcache.formats.hdf5_file import HDF5File, HDF5Files
from growcache.formats.hdf5_paths import group_names, paths_in_group
from growcache.formats.memory import LruCache
from growcache.schema import Sample
from growcache.store.contract import Entry

Layouts: TypeAlias = dict[str, DatasetLayout]

_KNOWN_NAME_BYTES = 1 << 24  # of names of groups, of all files together
_NAME_BYTES = 64  # of one name, estimated


class HDF5GroupsFormat(ObjectFormat):
    ranged = header_first = True

    def __init__(
        self,
        parent: str,
        named: Mapping[str, str] | None,
        scale: str | None,
        text: str | None,
    ) -> None:
        self._parent = parent
        self._named = named
        self._scale = scale
        self._text = text
        self._files = HDF5Files()
        self._known: LruCache[Entry, Sequence[str]] = LruCache(_KNOWN_NAME_BYTES)

    async def measure(self, reader: ObjectReader) -> Measure:
        count, size = len(await self._names(reader)), reader.entry.size
        each = size / max(1, count)
        together = max(1, min(count, int(SMALL_OBJECT_BYTES / max(1.0, each))))
        return Measure(max(1.0, each), 0, count, together, empty=f"no group at {self._shown}")

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        names = await self._names(reader)
        wanted: Sequence[int] | None = visit.given(len(names))
        if wanted is None:
            mine = ordinals_of_part(len(names), visit)
            wanted = take_some(mine, visit, visit.chosen_by(reader.entry.key))
        refuse_many_samples(reader.entry.key, len(wanted))
        file = self._files.get(reader.entry)
        groups = [names[ordinal] for ordinal in wanted]
        layouts = await file.call(
            reader, lambda opened: [self._layouts(opened, one, reader) for one in groups]
        )
        fields = [_fields(one, reader, file) for one in layouts]
        refuse_large_visit(reader.entry, sum(field.nbytes for one in fields for field in one))
        samples = await asyncio.gather(*(_sample(one, reader) for one in fields))
        return [
            (sample, ordinal, ordinal + 1)
            for sample, ordinal in zip(samples, wanted, strict=True)
        ]

    async def advice(self, reader: ObjectReader) -> str:
        names = await self._names(reader)
        if self._scale is not None or not names:
            return ""

        def look(opened: Any) -> str:
            layouts = self._layouts(opened, names[0], reader).values()
            said = (dataset_advice(opened, layout.path) for layout in layouts)
            return next(filter(None, said), "")

        return await self._files.get(reader.entry).call(reader, look)

    @property
    def _shown(self) -> str:
        return f"{self._parent}/*" if self._parent else "*"

    async def _names(self, reader: ObjectReader) -> Sequence[str]:
        found = self._known.get(reader.entry)
        if found is None:
            file = self._files.get(reader.entry)
            found = await file.call(reader, lambda opened: group_names(opened, self._parent))
            self._known.put(reader.entry, found, _NAME_BYTES * (1 + len(found)))
        return found

    def _layouts(self, file: Any, name: str, reader: ObjectReader) -> Layouts:
        key, group = reader.entry.key, f"{self._parent}/{name}".strip("/")
        paths = self._named or {
            path.replace("/", "."): path for path in paths_in_group(file, group)
        }
        found: Layouts = {}
        for field, path in paths.items():
            layout = describe_dataset(file, f"{group}/{path}", key, scaled=self._scale == "cf")
            if self._named is None and self._is_dropped(layout):
                continue
            check_filters(layout, key)
            found[field] = layout
        if not found:
            raise FormatError(
                f"{key}: group {group} has no dataset that is a field", code="GC303"
            )
        return found

    def _is_dropped(self, layout: DatasetLayout) -> bool:
        """Whether a text dataset is left out.

        By default those with dimensions are.
        """
        if layout.string_storage is None:
            return False
        return self._text == "drop" or (self._text is None and bool(layout.shape))


def _fields(layouts: Layouts, reader: ObjectReader, file: HDF5File) -> list[DatasetField]:
    return [DatasetField(name, layout, reader, file) for name, layout in layouts.items()]


async def _sample(fields: Sequence[DatasetField], reader: ObjectReader) -> Sample:
    read = await asyncio.gather(*(one.boxes([tuple(map(range, one.shape))]) for one in fields))
    sample: Sample = {}
    for one, (values,) in zip(fields, read, strict=True):
        sample |= whole_fields(one.name, one.layout, values, reader.entry.key)
    return sample


def group_option(options: Mapping[str, Any]) -> str | None:
    """Return the folder of the groups that are samples: "" for the root, None without the option."""
    value = options.get("group")
    if value is None:
        return None
    folder, _, last = str(value).strip("/").rpartition("/")
    if not isinstance(value, str) or last != "*" or "*" in folder:
        raise ConfigError(
            'source.options.group: expected "*", or a path that ends with it, such as "data/*", '
            f"found {value!r}"
        )
    return folder
