"""The facts of a cache as a whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from growcache.cache.deferrals import Deferrals
from growcache.cache.files import CacheLayout, fsync_directory, naming_full_disk
from growcache.cache.folders import (
    is_shard_name,
    open_folder,
    open_root,
    own_and_foreign_names,
    remove_entry,
)
from growcache.cache.index.schema import LEASE_BYTES_META, CacheTotals
from growcache.cache.index.writer import IndexDatabase, IndexWriter
from growcache.cache.recovery import (
    is_initialised,
    mark_initialised,
    rebuild_index,
)
from growcache.cache.shard_survey import numbers_on_disk
from growcache.cache.side_files import (
    DEFERRALS,
    Edition,
    Identity,
    deferrals_in_index,
    describe_differences,
    identity_notes,
    read_identity,
    read_issued,
    write_deferrals,
    write_editions,
    write_identity,
    write_issued,
)
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError, OtherSamplesError

DRAW_NOTES_META = "draw_notes"
# Parts with these prefixes may be only in the cache, because later versions leave some out.
OPTIONAL_PARTS = ("source.", "split.", "sampling.strata.")


def _as_in_shards(layout: CacheLayout, wanted: Identity, totals: CacheTotals) -> Identity:
    """Return the identity that shards imply if only they have it; refuse shards of another one."""
    for number in numbers_on_disk(layout):
        path = layout.sidecar(number)
        try:
            sidecar = Sidecar.from_bytes(path.read_bytes(), str(path))
        except (CorruptShardError, FileNotFoundError):
            continue
        if not sidecar.samples:
            continue
        known, found = wanted, wanted.known_as(sidecar.fingerprint)
        if found is None:
            raise OtherSamplesError(
                _other_configuration_message(
                    layout,
                    [f"fingerprint ({sidecar.fingerprint} → {known.fingerprint})"],
                    totals,
                )
            )
        wanted = found
    return wanted


def forget_cache(layout: CacheLayout, index: IndexDatabase) -> None:
    """Forget everything about a cache without samples, except its catalog.

    Files go first. A crash in between leaves rows of empty shards without a sidecar, which the
    next start removes.
    """
    with open_root(layout) as root:
        for path in (layout.identity, layout.issued, layout.editions, layout.deferrals):
            remove_entry(root, path.name)
    with open_folder(layout.shards) as shards:
        for name in own_and_foreign_names(shards, is_shard_name)[0]:
            remove_entry(shards, name)
    with index.transaction():
        index.clear()


def _other_configuration_message(
    layout: CacheLayout, differing: list[str], totals: CacheTotals
) -> str:
    what = "; ".join(differing[:5]) or "its fingerprint"
    cost = f"{totals.samples:,} samples ({totals.bytes + totals.retired_bytes:,} bytes)"
    return (
        f"the cache {layout.root} holds samples of another configuration: "
        f"{what}{_version_note(differing)}. To replace its {cost} as new ones come: growcache "
        "run --replace, or growcache.serve(config, replace=True). Otherwise choose another "
        f"cache.path, or empty it with: growcache clear {layout.root}"
    )


def _version_note(differing: list[str]) -> str:
    """Return a note if an upgrade of growcache caused the difference.

    >>> _version_note(["draw version (1 → 3)"])
    ': an earlier growcache drew them, and this one draws others'
    """
    for text in differing:
        if found := re.fullmatch(r"(?:draw|layout) version \((\d+) → (\d+)\)", text):
            old, new = map(int, found.groups())
            when = "an earlier" if old < new else "a newer"
            return f": {when} growcache drew them, and this one draws others"
    return ""


class CacheMeta:
    """Facts about the whole cache, in memory as on disk."""

    def __init__(self, layout: CacheLayout, index_writer: IndexWriter) -> None:
        self._layout = layout
        self._index_writer = index_writer
        self.identity = read_identity(layout.root)
        self._load()

    def _load(self) -> None:
        index = self._index_writer.index
        # Committed groups were issued, even if the file that records it is lost.
        noted = read_issued(self._layout)
        self.deferrals = deferrals_in_index({DEFERRALS: index.meta(DEFERRALS)})
        known = (index.last_group(), *self.deferrals.numbers[-1:])
        self.issued = max(-1 if noted is None else noted, *known)
        self.complete = bool(index.meta("complete", False))
        self.editions = index.editions()
        self._population = (index.meta("population"), index.meta("population_samples"))

    def claim(self, parts: dict[str, Any], totals: CacheTotals) -> bool:
        """Claim the cache; return whether it was emptied for that.

        Raises:
            FingerprintError: The cache has other samples.
        """
        layout, index = self._layout, self._index_writer.index
        noted = index.meta("claim")
        if self.identity is not None:
            noted = {
                key: value
                for key, value in self.identity.parts.items()
                if key in parts or key.startswith(OPTIONAL_PARTS)
            }
        if noted == parts:
            return False
        if noted is not None and totals.drawn:
            differences = describe_differences(noted, parts)
            raise OtherSamplesError(_other_configuration_message(layout, differences, totals))
        # Shards without a known configuration (the identity is lost) do not belong to this one.
        emptied = noted is not None and is_initialised(index)
        if noted is not None:
            # The listing is removed before its claim, because after a crash in between the next
            # source must not continue it.
            layout.catalog.unlink(missing_ok=True)
            fsync_directory(layout.root)
        if emptied:
            forget_cache(layout, index)
        with index.transaction():
            index.set_meta("claim", parts)
        if emptied:
            self._reset()
        return emptied

    def set_identity(self, identity: Identity, totals: CacheTotals) -> bool:
        """Set the identity; return whether the contents of the cache changed.

        The cache may have been emptied, or rebuilt after it had lost its index and identity.

        Raises:
            FingerprintError: The cache has samples of another identity.
        """
        index, index_writer = self._index_writer.index, self._index_writer
        with naming_full_disk(str(self._layout.identity)):
            settled = self._settle_identity(identity, totals)
        anew = not is_initialised(index)
        if anew:
            rebuild_index(self._layout, index, index_writer.write, settled)
            self._load()
        self.identity = settled
        return anew

    def _settle_identity(self, wanted: Identity, totals: CacheTotals) -> Identity:
        """Return the identity from now on: the one on disk, or the wanted one."""
        layout, index, current = self._layout, self._index_writer.index, self.identity
        if not is_initialised(index):
            wanted = _as_in_shards(layout, wanted, totals)
        if current is not None and current.yields_same_samples(wanted):
            known = wanted.known_as(current.fingerprint)
            if current.aliases or known is None or not known.aliases:
                return current
            return self._write_identity(replace(current, aliases=known.aliases))
        held = current.fingerprint if current else index.meta("fingerprint", wanted.fingerprint)
        known = None if current else wanted.known_as(held)
        if known is None and totals.drawn:
            differing = wanted.differing(current) if current else []
            raise OtherSamplesError(_other_configuration_message(layout, differing, totals))
        if known is None:
            forget_cache(layout, index)
        return self._write_identity(known or wanted)

    def _write_identity(self, identity: Identity) -> Identity:
        index = self._index_writer.index
        write_identity(self._layout.root, identity)
        with index.transaction():
            for key, value in identity_notes(identity).items():
                index.set_meta(key, value)
        return identity

    def _reset(self) -> None:
        for path in (self._layout.editions, self._layout.deferrals):
            path.unlink(missing_ok=True)
        self._index_writer.write(lambda: mark_initialised(self._index_writer.index))
        self.identity, self.issued, self.complete = None, -1, False
        self.editions, self._population = [], (None, None)
        self.deferrals = Deferrals()

    def add_edition(self, edition: Edition) -> None:
        with naming_full_disk(str(self._layout.editions)):
            write_editions(self._layout, [*self.editions, edition])
        self._index_writer.write(lambda: self._index_writer.index.insert_edition(edition))
        self.editions.append(edition)

    def set_deferrals(self, deferrals: Deferrals, *, retried: int = 0) -> None:
        """Record deferrals durably. ``retried`` holes no longer count as holes or visits."""
        with naming_full_disk(str(self._layout.deferrals)):
            write_deferrals(self._layout, deferrals)
        values = deferrals.to_values()
        index = self._index_writer.index

        def note() -> None:
            index.set_meta(DEFERRALS, values)
            if retried:
                totals = index.totals()
                less = {n: -min(retried, totals.get(n, 0)) for n in ("holes", "drawn_parts")}
                index.add_totals(**less)

        self._index_writer.write(note)
        self.deferrals = deferrals

    def issue(self, group: int) -> None:
        """Record durably that a permit for the group is about to be granted."""
        if group <= self.issued:
            return
        with naming_full_disk(str(self._layout.issued)):
            write_issued(self._layout, group)
        self.issued = group

    def set_complete(self, complete: bool) -> None:
        if complete != self.complete:
            self._index_writer.write(
                lambda: self._index_writer.index.set_meta("complete", complete)
            )
            self.complete = complete

    def set_reuse(self, most: int | None, reaction: str) -> None:
        """Record the limit of uses per job for readers, which have no configuration."""
        index = self._index_writer.index
        wanted = {"max_reuse": most, "on_max_reuse": reaction}
        if most is None and index.meta("max_reuse") is None:
            return
        if any(index.meta(name) != value for name, value in wanted.items()):

            def note() -> None:
                for name, value in wanted.items():
                    index.set_meta(name, value)

            self._index_writer.write(note)

    @property
    def draw_notes(self) -> Any:
        """Notes of `sampling.draw_notes`, or None without any."""
        return self._index_writer.index.meta(DRAW_NOTES_META)

    def set_draw_notes(self, values: Mapping[str, Any]) -> None:
        self._index_writer.write(
            lambda: self._index_writer.index.set_meta(DRAW_NOTES_META, values)
        )

    def set_lease_bytes(self, nbytes: int) -> None:
        """Record the limit of all leases for readers, which have no configuration."""
        index = self._index_writer.index
        if index.meta(LEASE_BYTES_META) != nbytes:
            self._index_writer.write(lambda: index.set_meta(LEASE_BYTES_META, nbytes))

    def set_population(self, parts: int | None, samples: float | None) -> None:
        if (parts, samples) == self._population:
            return

        def note() -> None:
            self._index_writer.index.set_meta("population", parts)
            self._index_writer.index.set_meta("population_samples", samples)

        self._index_writer.write(note)
        self._population = (parts, samples)
