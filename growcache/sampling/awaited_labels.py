"""The labels of the sources until objects have them: tables being read, and folders being listed."""

from __future__ import annotations

from collections.abc import Sequence

from growcache.config_source import SourceConfig
from growcache.sampling.folder_labels import finds_folder_classes
from growcache.sampling.labels import Labels
from growcache.sampling.objects import Objects
from growcache.sampling.schema_search import SchemaSearch


class AwaitedLabels:
    """Labels that are still awaited. ``found`` has those of the tables after they are read."""

    def __init__(
        self, sources: Sequence[SourceConfig], objects: Objects, search: SchemaSearch
    ) -> None:
        self.found: Labels | None = None
        self._objects = objects
        self._search = search
        self._need_folders = any(map(finds_folder_classes, sources))
        self._are_needed = self._need_folders or any(one.labels is not None for one in sources)

    def __bool__(self) -> bool:
        return self._are_needed and self._objects.labels is None

    @property
    def event(self) -> str:
        """The awaited event, in words."""
        if self.found is None:
            return "the labels"
        return "the whole listing, whose folders are the classes"

    def join(self, *, listed: bool) -> None:
        """Give the labels to the objects if all labels are known."""
        if self.found is None or self._objects.labels is not None:
            return
        if self._need_folders:
            if not self._search.find_folders(listed=listed):
                return
            self.found.add_folders(self._search.folders)
        self._objects.labels = self.found
