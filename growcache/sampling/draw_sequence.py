"""The draws of a cache while its listing grows. Editions are added on demand.

The order of the draws counts groups by their draw number, which skips makeup groups. The record
of deferrals (`cache/deferrals.py`) has the parts of makeup groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from growcache.cache.cache import Cache
from growcache.cache.deferrals import Deferrals, Place
from growcache.cache.side_files import Edition
from growcache.cache.status_model import MovedStatus, StratumStatus
from growcache.config import Config
from growcache.errors import CacheError, ConfigError
from growcache.sampling.draw_notes import DrawNotes
from growcache.sampling.draws import Draws, GroupDraw
from growcache.sampling.lanes import owned_lanes
from growcache.sampling.objects import Objects
from growcache.sampling.orders import Ints
from growcache.sampling.population import (
    ObjectStrata,
    Population,
    block_draws,
    block_quotas,
    source_names,
    source_shares,
    stratum_names,
    stratum_shares,
)
from growcache.sampling.sizing import Sizing, objects_take_turns
from growcache.sampling.stratum_counts import stratum_statuses
from growcache.sampling.stratum_draws import DrawnEdition, EditionStrata
from growcache.store.catalog import Catalog


class DrawSequence:
    def __init__(
        self,
        config: Config,
        cache: Cache,
        catalog: Catalog,
        objects: Objects,
        sizing: Sizing,
    ) -> None:
        sampling = self._sampling = config.sampling
        self._cache = cache
        self._catalog = catalog
        self._editions: list[Edition] = []
        self._lanes = owned_lanes(*sampling.node_of_nodes)
        self.replacement = sampling.order == "replacement"
        self.population = Population(catalog, objects, sizing)
        self._objects = objects
        self._weights = config.weights
        self._stratification = self._strata_of_objects(config)
        self._notes = DrawNotes.of(cache.meta.draw_notes, cache.meta.editions)
        self._draws = Draws(
            sampling.seed,
            sizing,
            turns=objects_take_turns(sampling),
            replacement=self.replacement,
            notes=self._notes,
        )
        for edition in cache.meta.editions:
            self.population.check_listing(edition)
            self._add(edition, self._drawn_edition(edition))
        self._draws.recall()
        self._peeked: tuple[tuple[int, int], GroupDraw | None] | None = None
        self._last: GroupDraw | None = None

    def _strata_of_objects(self, config: Config) -> ObjectStrata | None:
        if config.weights is not None:
            known = [str(number) for number in range(len(config.weights))]
            return ObjectStrata(self._objects, self.population, source_names, known)
        if config.sampling.strata is None:
            return None
        return ObjectStrata(
            self._objects,
            self.population,
            stratum_names(config),
            by_objects=config.sampling.weight_by == "objects",
        )

    def _strata(self, listed: int, lanes: str | None) -> EditionStrata:
        return (self._stratification or self.population).strata(listed, lanes)

    def _strata_of(self, edition: Edition) -> EditionStrata:
        if self._stratification is not None:
            return self._stratification.strata(edition.objects, edition.lanes)
        known = self._notes.own(edition)
        strata = self.population.strata(edition.objects, edition.lanes, known)
        if known is None:
            own, parts = int(strata.own[0]), int(strata.sizes[0])
            self._notes.note_own(edition, own, parts if edition.lanes else 0)
        return strata

    def _quotas(self, strata: EditionStrata, listed: int) -> Ints | None:
        if self._weights is not None:  # of visits, such that samples arrive by the weights
            per_visit = self.population.per_visit(listed)
            wanted = source_shares(self._weights, strata.own, per_visit)
            return block_quotas(wanted, block_draws(wanted))
        if self._sampling.strata is None:
            return None
        weights = self._sampling.strata.weights
        return block_quotas(stratum_shares(strata.names, strata.natural, weights))

    @property
    def needs_whole_listing(self) -> bool:
        return self._stratification is not None and self._weights is None

    def rounds(self, group: int) -> list[float]:
        """Return the passes over each source before a group; empty with a single source."""
        if self._weights is None or not self._editions:
            return []
        return [float(found) for found in self._draws.rounds(self._number(group))]

    def distinct(self, group: int) -> int | None:
        """Return the number of different parts in earlier groups, or None without strata."""
        return self._draws.distinct(self._number(group)) if self._stratification else None

    def strata(self, group: int) -> list[StratumStatus]:
        """Return the draws of each stratum in earlier groups; empty without strata."""
        if self._sampling.strata is None or not self._editions:
            return []
        strata, drawn = self._draws.drawn(self._number(group))
        return stratum_statuses(strata.names, strata.own, drawn, replacement=self.replacement)

    def moved(self, group: int) -> MovedStatus:
        """Return the draws of earlier groups that another node may have made, too."""
        if len({edition.lanes for edition in self._editions}) < 2:
            return MovedStatus()
        try:
            return MovedStatus(*self._draws.moved(self._number(group)))
        except LookupError:  # no part belongs to this node any more
            return MovedStatus()

    @property
    def up_to_date(self) -> bool:
        if not self._editions:
            return False
        last = self._editions[-1]
        return (last.objects, last.lanes) == (len(self._catalog), self._lanes)

    def again(self, group: int) -> GroupDraw | None:
        if self._last is None or self._last.group != group:
            self._last = self._held(group)
        return self._last

    @property
    def _record(self) -> Deferrals:
        return self._cache.meta.deferrals

    def _number(self, group: int) -> int:
        return self._record.draw_number(group)

    def _held(self, group: int) -> GroupDraw | None:
        if group not in self._record.makeups:
            draw = self._draws.group(self._number(group))
            return draw and replace(draw, group=group)
        items = self._record.makeups[group]
        return self.gathered(group, items) if items else None  # else it is forgotten

    def gathered(self, group: int, places: Sequence[Place]) -> GroupDraw:
        """Return the parts of one or more places as the draw of a makeup group."""
        drawn = {number: self._drawn_first(number) for number in dict(places)}
        rounds = [_rounds(drawn[number])[place] for number, place in places]
        weighted = all(draw.weights is not None for draw in drawn.values())
        weights = [drawn[number].weights[place] for number, place in places] if weighted else []  # type: ignore[index]
        return GroupDraw(
            group,
            max(draw.edition for draw in drawn.values()),
            int(min(rounds)),
            np.array([drawn[number].parts[place] for number, place in places], np.int64),
            np.array(rounds, np.int64),
            np.array(weights, np.float32) if weighted else None,
        )

    def _drawn_first(self, group: int) -> GroupDraw:
        draw = self._draws.group(self._number(group))
        if draw is None:
            raise CacheError(
                f"group {group}, whose visits were set aside, does not belong to this cache; "
                f"repair it with: growcache check {self._cache.layout.root} --repair",
                code="GC416",
            )
        return draw

    def ahead(self, group: int, next_new: int) -> GroupDraw | None:
        """Return the draw of a group that is refetched before its turn.

        The listing must be complete, because it decides the parts of the skipped groups.
        """
        self._extend(next_new, ended=True)
        return self._held(group)

    def next(self, group: int, round_: int) -> GroupDraw | None:
        """Return the draw of the first new group.

        ``round_`` is the round of the group before it.

        It is None before anything is listed, and after the end of a fixed set.
        """
        draw = self._peek(group)
        # Without a part for this node, one more page may help, so do not wait for a doubling.
        ended = draw is None or self._begins_round(draw, round_)
        if self._extend(group, ended=ended):
            draw = self._peek(group)
        if self._notes.are_due:
            self._cache.meta.set_draw_notes(self._notes.values(self._editions))
        return draw

    def _begins_round(self, draw: GroupDraw, round_: int) -> bool:
        """Whether a group repeats parts although undrawn ones may be waiting in the listing."""
        if self.replacement:
            return False
        if self._weights is None:
            return draw.round != round_
        grown = self._objects.counts(len(self._catalog)) > self._counts
        beginning = self._draws.beginning(self._number(draw.group))
        return bool(grown[beginning].any())

    def _peek(self, group: int) -> GroupDraw | None:
        """Draw without consequences, because a wait for room asks repeatedly for the same group."""
        if not self._editions:
            return None
        asked = (group, len(self._editions))
        if self._peeked is None or self._peeked[0] != asked:
            self._peeked = (asked, self._drawn(group))
        return self._peeked[1]

    def _drawn(self, group: int) -> GroupDraw | None:
        try:
            return self._held(group)
        except LookupError:  # the edition has no part for this node
            if not self._catalog.complete or not self.up_to_date:
                return None
            node, nodes = self._sampling.node_of_nodes
            raise ConfigError(
                f"none of the source's parts belongs to node {node} of {nodes}; "
                "use fewer sampling.nodes",
                code="GC706",
            ) from None

    def _extend(self, group: int, *, ended: bool) -> bool:
        objects, complete = len(self._catalog), self._catalog.complete
        if self.needs_whole_listing and not complete:
            return False
        moved = bool(self._editions) and self._editions[-1].lanes != self._lanes
        if not moved and not wants_edition(
            objects, self._editions, complete=complete, drawn=ended
        ):
            return False
        is_drawn_anew = moved or not self._editions
        if is_drawn_anew and not self._has_all_sources(objects, complete=complete):
            return False
        self._catalog.flush()  # the edition must not outlive the listing that it counts
        first_group = self._number(group)
        edition = next_edition(self._catalog, self._editions, first_group, self._lanes)
        # Before it is durable, because this may refuse the strata.
        drawn = self._drawn_edition(edition)
        self._cache.meta.add_edition(edition)
        self._add(edition, drawn)
        return True

    def _drawn_edition(self, edition: Edition) -> DrawnEdition:
        strata = self._strata_of(edition)
        quotas = self._quotas(strata, edition.objects)
        return DrawnEdition(edition.edition, edition.first_group, strata, edition.lanes, quotas)

    def _add(self, edition: Edition, drawn: DrawnEdition) -> None:
        self._editions.append(edition)
        self._draws.add(drawn)
        if self._weights is not None:
            self._counts = self._objects.counts(edition.objects)

    def _has_all_sources(self, listed: int, *, complete: bool) -> bool:
        if self._weights is None:
            return True
        parts = self._strata(listed, self._lanes).own
        if not complete or parts.all():
            return bool(parts.all())
        number = int(np.flatnonzero(parts == 0)[0])
        node, nodes = self._sampling.node_of_nodes
        why = "split.use leaves none of them"
        if self._objects.counts(listed)[number]:
            why = f"none of them belongs to node {node} of {nodes}: use fewer sampling.nodes"
        raise ConfigError(
            f"source.{number}: there is no object to draw from; {why}", code="GC217"
        )


def _rounds(draw: GroupDraw) -> Ints:
    return np.full(len(draw.parts), draw.round) if draw.rounds is None else draw.rounds


GROWTH = 2.0  # a new edition costs a permutation of all parts, so one per doubling


def wants_edition(
    objects: int, editions: list[Edition], *, complete: bool, drawn: bool
) -> bool:
    known = editions[-1].objects if editions else 0
    return objects > known and (complete or drawn or objects >= GROWTH * known)


def next_edition(
    catalog: Catalog, editions: list[Edition], number: int, lanes: str | None = None
) -> Edition:
    objects = len(catalog)
    return Edition(len(editions), objects, catalog.digest(objects), number, lanes)
