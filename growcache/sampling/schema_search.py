"""Find schema and sizes: from the samples of the cache, or from the first readable objects."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from growcache.cache.cache import Cache
from growcache.cache.side_files import Identity
from growcache.config import Config
from growcache.errors import ConfigError, FormatError, SamplingError
from growcache.formats import names_decide
from growcache.formats.base import Measure
from growcache.sampling.classes import Classes
from growcache.sampling.fingerprint import identify
from growcache.sampling.folder_labels import listed_folders, named_folder_classes
from growcache.sampling.messages import AS_FOUND, FOLDER_CLASSES, LABELS, Message
from growcache.sampling.objects import Objects
from growcache.sampling.sampler_pool import (
    MOST_SUSPICION,
    SamplerDeath,
    SamplerSlot,
    crash_suspects,
)
from growcache.sampling.sizing import (
    MeasuredSource,
    Sizing,
    group_limits,
    measure_sizing,
    stored_sizing,
    with_configured_sizes,
)
from growcache.sampling.sources import name_source
from growcache.schema import Schema
from growcache.store.catalog import Catalog
from growcache.usercode import short_key

PROBED = 16  # objects tried together, in order, to find a readable one
MOST_FAILED = 1000  # before max_skipped decides whether the search continues
CRASH = SamplerDeath(1).suspicion  # of one crash, which equals that of several SIGKILLs
RETRY_SECONDS = 2.0  # after a store that did not answer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundIdentity:
    identity: Identity
    sizing: Sizing


@dataclass(slots=True)
class _SourceSearch:
    source: int
    unreadable: int = 0
    failed: int = 0
    set_aside: int = 0
    first_error: str = ""
    suspicion: int = 0
    answer: Message | None = None


class SchemaSearch:
    """One search per source, by one sampler at a time. A sampler's death only repeats it."""

    def __init__(
        self, config: Config, cache: Cache, catalog: Catalog, objects: Objects
    ) -> None:
        self._config = config
        self._cache = cache
        self._catalog = catalog
        self._objects = objects
        self._searches = [_SourceSearch(source) for source in range(len(config.sources))]
        self._probing_slot: SamplerSlot | None = None
        self._not_before = 0.0
        self._silent = False  # whether the store did not answer the last time
        self.waiting_for = "samplers to start"
        stored = cache.meta.identity
        # Classes that the listing showed once, and which stay as they are.
        self.folders: Sequence[str] = stored.sizes.get(FOLDER_CLASSES, ()) if stored else ()

    def find_folders(self, *, listed: bool) -> bool:
        """Whether folder classes are known, which needs the whole listing once."""
        if not self.folders and listed:
            self.folders = listed_folders(self._catalog, self._config.sources)
        return bool(self.folders)

    @property
    def _search(self) -> _SourceSearch:
        """The first search without an answer, or the last one if all have an answer."""
        return next((s for s in self._searches if s.answer is None), self._searches[-1])

    def known(self, introduction: Message, *, listed: bool) -> FoundIdentity | None:
        """Return the identity that the cache's own samples show.

        It is None without samples, and before they are listed again.
        """
        stored = self._cache.meta.identity
        if stored is None or not self._cache.totals().drawn_shards:
            return None
        if self.lacks_objects(listed=listed):
            return None
        ranged = any(introduction["ranged"])
        sizing = with_configured_sizes(self._config, stored_sizing(stored.sizes), ranged=ranged)
        return self._found(stored.schema, sizing, introduction, stored.sizes)

    def lacks_objects(self, *, listed: bool) -> bool:
        """Whether the listing was lost, and has not reached the last edition again."""
        editions = self._cache.meta.editions
        return not listed and bool(editions) and len(self._catalog) < editions[-1].objects

    def probe(self, ready: Sequence[SamplerSlot], *, listed: bool) -> None:
        """Let a sampler look at the next objects.

        Only the listing's order chooses the objects, because they decide the cache's schema.
        """
        now = time.monotonic()
        if self._probing_slot is not None or not ready or now < self._not_before:
            return
        if self._cache.meta.identity is not None and self._cache.totals().drawn_shards:
            return
        self._give_up_early(listed=listed)
        search = self._search
        first, found = search.unreadable, self._found_objects
        if listed and not found:
            raise ConfigError(self._nothing_drawn(), code="GC505")
        if found <= first or not (listed or found >= first + PROBED):
            self.waiting_for = "the listing to show an object that can be read"
            return
        # If one of them crashes samplers, only the first one decides. The others belong to
        # permits, which can tell which object it is.
        probed = 1 if search.suspicion >= CRASH else PROBED
        listed_visits = self._objects.visits(
            self._objects.numbers(search.source, first, min(found, first + probed))
        )
        is_purged = self._cache.purger.is_visit_purged
        visits = [visit for visit in listed_visits if not is_purged(visit.keys)]
        if not visits:
            search.unreadable += len(listed_visits)
            return
        if not self._silent:
            self.waiting_for = "a first object to be read"
        self._probing_slot = ready[0]
        self._probing_slot.probing = True
        self._probing_slot.note_progress()
        self._probing_slot.send(
            {"type": "probe", "visits": [visit.to_values() for visit in visits]}
        )

    def _nothing_drawn(self) -> str:
        if self._objects.unmatched:
            return self._objects.complaint()
        use = self._config.split.use if self._config.split is not None else ""
        of = f" of source.{self._search.source}" if self._config.weights is not None else ""
        count = "" if of else f"{len(self._catalog):,} "
        return (
            f"split.use: none of the {count}objects{of} belongs to {use}; "
            "raise its share, or make the groups smaller"
        )

    def lost(self, slot: SamplerSlot, death: SamplerDeath) -> None:
        if slot is not self._probing_slot:
            return
        self._probing_slot = None
        search = self._search
        search.suspicion += death.suspicion
        if search.suspicion >= MOST_SUSPICION:
            at = self._objects.numbers(search.source, search.unreadable, search.unreadable + 1)
            first = short_key(self._objects.visits(at)[0].entry.key)
            raise SamplingError(
                f"sampler after sampler died while it looked at {first}, the last {death}"
                + ("" if death.stalled else crash_suspects(self._config)),
                code="GC503",
            )

    def answered(
        self, slot: SamplerSlot, message: Message, introduction: Message, *, listed: bool
    ) -> FoundIdentity | None:
        if slot is not self._probing_slot:
            return None
        self._probing_slot, slot.probing = None, False
        if "transient" in message:
            self._not_before = time.monotonic() + RETRY_SECONDS
            self.waiting_for, self._silent = message["transient"], True
            return None
        self._silent = False
        if "mixed" in message:
            raise SamplingError(message["mixed"], code="GC506")
        if "errors" in message:
            search = self._search
            search.unreadable += len(message["errors"])
            search.failed += len(message["errors"]) - message["passed_over"]
            search.failed -= message["set_aside"]
            search.set_aside += message["set_aside"]
            search.suspicion = 0  # of the probed objects
            search.first_error = search.first_error or message["errors"][0]
            self._give_up_early(listed=listed)
            return None
        if advice := message.get("advice"):
            _log.warning("%s", name_source(advice, self._search.source, len(self._searches)))
        self._search.answer = message
        answers = [search.answer for search in self._searches if search.answer is not None]
        return self._measured(answers, introduction) if self._is_over else None

    @property
    def _is_over(self) -> bool:
        return all(search.answer is not None for search in self._searches)

    @property
    def _found_objects(self) -> int:
        return int(self._objects.counts(len(self._catalog))[self._search.source])

    def _give_up_early(self, *, listed: bool) -> None:
        search = self._search
        if not search.first_error:
            return
        objects, skipped = self._found_objects, self._config.sampling.max_skipped
        if listed and search.unreadable >= objects and search.set_aside:
            self._start_over(search)
            return
        which = "no object of the source"
        if not (listed and search.unreadable >= objects):
            if search.failed < max(MOST_FAILED, skipped * objects):
                return
            which = f"none of the first {search.unreadable:,} objects of the source"
        source = self._config.sources[search.source]
        shown = " and ".join(dict.fromkeys(form for form, _ in source.formats))
        key = "source.format" if source.dataset is None else "source.dataset"
        said = f"{which} yields a sample with {key} {shown}; the first: {search.first_error}"
        raise SamplingError(name_source(said, search.source, len(self._searches)), code="GC505")

    def _start_over(self, search: _SourceSearch) -> None:
        """Search again, because objects that failed alone may be the only readable ones."""
        self.waiting_for = f"the store to answer ({search.first_error})"
        self._not_before = time.monotonic() + RETRY_SECONDS
        search.unreadable = search.failed = search.set_aside = 0

    def _measured(self, answers: Sequence[Message], introduction: Message) -> FoundIdentity:
        schema = self._covering([Schema.from_json(one["schema"]) for one in answers])
        schema = schema.with_classes(self._classes)
        measured = [
            MeasuredSource(
                Measure(**one["measure"]),
                one["samples_per_object"],
                ranged,
                ranged and names_decide(source),
            )
            for one, ranged, source in zip(
                answers, introduction["ranged"], self._config.sources, strict=True
            )
        ]
        weights = self._config.weights or (1.0,)
        values = float(np.average([one["sample_bytes"] for one in answers], weights=weights))
        sizing = measure_sizing(self._config, measured, schema, values)
        kept = {
            "ranged": any(one.ranged for one in measured),
            "record_bytes": self._cache.record_bytes(schema, values),
            "sample_bytes": values,
            **group_limits(self._config, sizing, schema, values),
            "samples_per_whole": sizing.samples_per_object,
            **({FOLDER_CLASSES: list(self.folders)} if self.folders else {}),
            **({AS_FOUND: True} if self._config.sampling.transform else {}),
        }
        return self._found(schema, sizing, introduction, kept)

    @property
    def _classes(self) -> Classes:
        """The classes of the samples' fields before any transform."""
        labels = self._objects.labels
        named = named_folder_classes(self._config.sources)
        return named if labels is None else {**named, **labels.classes}

    def _covering(self, schemas: Sequence[Schema]) -> Schema:
        try:
            return Schema.covering(schemas)
        except FormatError as error:
            raise SamplingError(
                f"the sources differ: {error}; make them alike in sampling.transform, or say what "
                "is meant in sampling.schema",
                code="GC506",
            ) from None

    def _found(
        self, schema: Schema, sizing: Sizing, introduction: Message, kept: dict[str, Any]
    ) -> FoundIdentity:
        labels = self._objects.labels
        digests = introduction["digests"] | {LABELS: labels.digest if labels else None}
        texts = introduction["text_digests"]
        return FoundIdentity(
            identify(self._config, schema, sizing, digests, kept, texts), sizing
        )
