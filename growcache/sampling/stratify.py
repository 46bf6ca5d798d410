"""Which stratum an object is of, and where the parts of each stratum lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from growcache.config import Config
from growcache.errors import ConfigError
from growcache.sampling.draws import Ints, locate
from growcache.sampling.growing import Growing
from growcache.sampling.objects import Objects
from growcache.sampling.population import Population
from growcache.sampling.strata import MOST_STRATA
from growcache.sampling.stratified import Strata
from growcache.usercode import short

# The names of the strata of the objects from one number to another.
NamedBy: TypeAlias = Callable[[Objects, int, int], Iterable[str]]
_AT_ONCE = 4096  # objects whose labels are looked up together


def named_by(config: Config) -> NamedBy:
    """Return what tells the strata of objects.

    Raises:
        ConfigError: ``sampling.strata.by`` is nothing that is known before objects are read.
    """
    assert config.sampling.strata is not None
    by = config.sampling.strata.by
    (source,) = config.sources
    labels = source.labels
    if labels is not None and by in labels.columns:
        return _labelled(by)
    if "(?P<stratum>" in by:
        return _by_key(_matching(by))
    form, options = source.formats[0]  # keys are those of the first field
    if by == "label" and form == "image" and options.get("label", "folder") == "folder":
        return _by_key(_folder)
    raise ConfigError(
        "sampling.strata.by: expected one of source.labels.columns, a regular expression with "
        f"(?P<stratum>…) for the keys, or label with source.format image, found {by!r}"
    )


def sources_named(objects: Objects, start: int, stop: int) -> Iterable[str]:
    """Yield the numbers of the objects' sources, as names: what is mixed."""
    return map(str, objects.sources(start, stop).tolist())


def _labelled(column: str) -> NamedBy:
    def names(objects: Objects, start: int, stop: int) -> Iterator[str]:
        for at in range(start, stop, _AT_ONCE):
            for found in objects.stops(np.arange(at, min(stop, at + _AT_ONCE))):
                yield str(found.joined[column])

    return names


def _by_key(name: Callable[[str], str]) -> NamedBy:
    return lambda objects, start, stop: map(name, objects.keys(start, stop))


def _matching(by: str) -> Callable[[str], str]:
    pattern = re.compile(by)

    def name(key: str) -> str:
        match = pattern.search(key)
        if match is None or match["stratum"] is None:
            raise ConfigError(
                f"sampling.strata.by: expected {by} to match every key, found {short(key)}; mend "
                "it, or narrow source.url"
            )
        return match["stratum"]

    return name


def _folder(key: str) -> str:
    return key.rpartition("/")[0].rpartition("/")[2]


class Stratification:
    """The strata of the objects that are drawn from, as far as they are listed.

    Strata are numbered as they first appear in the listing, so that numbers never change.

    Args:
        objects: that are drawn from.
        population: their parts.
        names: tells the strata of objects.
        node: this machine's number among ``nodes``.
        nodes: machines that draw disjoint objects. By object and not by part as elsewhere:
            then each stratum's parts can be numbered without a look at every one of them.
        known: strata that come first, whether there is an object of theirs by now or not.
        by_objects: all objects are weighted alike.
    """

    def __init__(
        self,
        objects: Objects,
        population: Population,
        names: NamedBy,
        node: int,
        nodes: int,
        known: Sequence[str] = (),
        *,
        by_objects: bool = False,
    ) -> None:
        self._by_objects = by_objects
        self._objects = objects
        self._population = population
        self._names = names
        self._node = node
        self._nodes = nodes
        self._numbers = {name: number for number, name in enumerate(known)}
        self._strata = Growing(np.dtype(np.int32))  # of the objects, by their number

    def strata(self, listed: int) -> Strata:
        """Return the strata of the objects among the first ``listed`` of the catalog.

        Raises:
            ConfigError: an object is of no stratum, or there are too many.
        """
        objects = self._objects.among(listed)
        self._look(objects)
        starts = self._population.starts(listed)
        parts = np.diff(starts) * self._population.own(objects, self._node, self._nodes)
        strata = self._strata.values[:objects]
        order = np.argsort(strata, kind="stable")
        ends = np.cumsum(parts[order])
        sorted_starts = np.concatenate([np.zeros(1, np.int64), ends])
        firsts = np.searchsorted(strata[order], np.arange(len(self._numbers) + 1))
        bounds = sorted_starts[firsts]

        def place(stratum: int, local: Ints) -> Ints:
            places, within = locate(sorted_starts, bounds[stratum] + local)
            found: Ints = starts[order[places]] + within
            return found

        def starts_of(stratum: int) -> Ints:
            first, stop = firsts[stratum], firsts[stratum + 1]
            found: Ints = sorted_starts[first : stop + 1] - bounds[stratum]
            return found

        natural = counts = np.diff(bounds)
        if self._by_objects:
            natural = np.bincount(strata[parts > 0], minlength=len(self._numbers))
        return Strata(tuple(self._numbers), counts, place, starts_of, natural)

    def _look(self, objects: int) -> None:
        known = len(self._strata)
        if objects <= known:
            return
        numbers = self._numbers
        names = self._names(self._objects, known, objects)
        found = (numbers.setdefault(name, len(numbers)) for name in names)
        self._strata.extend(np.fromiter(found, np.int32, objects - known))
        if len(numbers) > MOST_STRATA:
            raise ConfigError(
                f"sampling.strata.by: expected at most {MOST_STRATA:,} strata, found "
                f"{len(numbers):,}; choose something that more objects have in common"
            )
