"""Which stratum an object belongs to, and how often each stratum is drawn.

Draws are dealt in blocks. Each block has the same number of draws of every stratum, in a random order of its own
("permuted blocks": Matts & Lachin, Controlled Clinical Trials 9, 1988). So shares are exact from block to block, and
the stratum of a draw follows from its number alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from growcache.config import Config
from growcache.errors import ConfigError
from growcache.sampling.draws import EditionStrata
from growcache.sampling.objects import GrowingArray, Objects
from growcache.sampling.orders import Floats, Ints, locate
from growcache.sampling.population import Population
from growcache.usercode import short_key

BLOCK_DRAWS = 1024  # of a block, or
DRAWS_PER_STRATUM = 32  # on average, where that is more: it bounds the error of a share
DRAWS_OF_THE_LEAST = 128  # of a source; it bounds the error of its share to 0.4 %
MOST_BLOCK_DRAWS = 1 << 18  # which takes milliseconds to permute
MOST_STRATA = 100_000


_SHOWN = 5
_POWERS = {"balanced": 0.0, "natural": 1.0, "sqrt": 0.5}  # of the number of parts

Weights = str | Mapping[str, float]


def stratum_shares(names: Sequence[str], parts: Ints, weights: Weights) -> Floats:
    """Return the share of the draws that each stratum shall have; they add up to 1.

    Args:
        names: of the strata.
        parts: that each has; none of a stratum that cannot be drawn now.
        weights: ``balanced``: all alike; ``natural``: as many as it has parts; ``sqrt``: by the
            square root of that; or a number for each by its name, 1 where it is not named.

    Raises:
        ConfigError: a stratum is named that does not exist, or nothing is left to draw.

    >>> stratum_shares(["a", "b"], np.array([100, 900]), "sqrt").round(2).tolist()
    [0.25, 0.75]
    """
    if isinstance(weights, str):
        wanted = np.power(np.asarray(parts, np.float64), _POWERS[weights]) * (parts > 0)
    else:
        _refuse_unknown(names, weights)
        wanted = np.array([float(weights.get(name, 1.0)) for name in names]) * (parts > 0)
    if not wanted.sum():
        raise ConfigError(
            "sampling.strata.weights: expected a stratum with a weight above 0 that has samples, "
            f"found none among {_named(names)}"
        )
    found: Floats = wanted / wanted.sum()
    return found


def _refuse_unknown(names: Sequence[str], weights: Mapping[str, float]) -> None:
    known = set(names)
    if unknown := [name for name in weights if name not in known]:
        raise ConfigError(
            f"sampling.strata.weights: there is no stratum {_named(unknown)}; the source has "
            f"{_named(sorted(known))}"
        )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def source_shares(weights: Sequence[float], parts: Ints, per_visit: Floats) -> Floats:
    """Return the share of the draws that each source shall have; they add up to 1.

    >>> source_shares([1.0, 1.0], np.array([9, 9]), np.array([1.0, 3.0])).tolist()
    [0.75, 0.25]
    """
    wanted = np.asarray(weights) / per_visit * (parts > 0)
    found: Floats = wanted / wanted.sum()
    return found


def block_draws(wanted: Floats) -> int:
    """Return of how many draws a block must be for the smallest share to come out.

    >>> block_draws(np.array([0.5, 0.5])), block_draws(np.array([0.999, 0.001]))
    (1024, 128000)
    """
    least = float(wanted[wanted > 0].min())
    return min(MOST_BLOCK_DRAWS, max(BLOCK_DRAWS, round(DRAWS_OF_THE_LEAST / least)))


def block_quotas(wanted: Floats, block: int | None = None) -> Ints:
    """Return how many draws of a block each stratum has: at least one, unless it has no share.

    >>> block_quotas(np.array([0.5, 0.4999, 0.0001, 0.0])).tolist()
    [512, 511, 1, 0]
    """
    drawn = np.flatnonzero(wanted)
    total = block or max(BLOCK_DRAWS, DRAWS_PER_STRATUM * len(drawn))
    exact = wanted[drawn] * total
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    # The largest remainders first; rare strata that were raised to one are paid for by the rest.
    order = np.argsort(counts - exact, kind="stable")
    missing = total - int(counts.sum())
    if missing > 0:
        counts[order[:missing]] += 1
    while missing < 0:
        over = [i for i in order[::-1] if counts[i] > 1][:-missing]
        counts[over] -= 1
        missing += len(over)
    found = np.zeros(len(wanted), np.int64)
    found[drawn] = counts
    return found


# The names of the strata of the objects from one number to another.
StratumNames: TypeAlias = Callable[[Objects, int, int], Iterable[str]]
_AT_ONCE = 4096  # objects whose labels are looked up together


def stratum_names(config: Config) -> StratumNames:
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


def source_names(objects: Objects, start: int, stop: int) -> Iterable[str]:
    """Yield the numbers of the objects' sources, as names: what is mixed."""
    return map(str, objects.sources(start, stop).tolist())


def _labelled(column: str) -> StratumNames:
    def names(objects: Objects, start: int, stop: int) -> Iterator[str]:
        for at in range(start, stop, _AT_ONCE):
            for found in objects.stops(np.arange(at, min(stop, at + _AT_ONCE))):
                yield str(found.joined[column])

    return names


def _by_key(name: Callable[[str], str]) -> StratumNames:
    return lambda objects, start, stop: map(name, objects.keys(start, stop))


def _matching(by: str) -> Callable[[str], str]:
    pattern = re.compile(by)

    def name(key: str) -> str:
        match = pattern.search(key)
        if match is None or match["stratum"] is None:
            raise ConfigError(
                f"sampling.strata.by: expected {by} to match every key, found {short_key(key)}; mend "
                "it, or narrow source.url"
            )
        return match["stratum"]

    return name


def _folder(key: str) -> str:
    return key.rpartition("/")[0].rpartition("/")[2]


class ObjectStrata:
    """The strata of the objects that are drawn from, as far as they are listed.

    Strata are numbered as they first appear in the listing, so that numbers never change.
    """

    def __init__(
        self,
        objects: Objects,
        population: Population,
        names: StratumNames,
        known: Sequence[str] = (),
        *,
        by_objects: bool = False,
    ) -> None:
        self._by_objects = by_objects
        self._objects = objects
        self._population = population
        self._names = names
        self._numbers = {name: number for number, name in enumerate(known)}
        self._strata = GrowingArray(np.dtype(np.int32))  # of the objects, by their number

    def strata(self, listed: int, lanes: str | None = None) -> EditionStrata:
        """Return the strata of the objects among the first ``listed`` of the catalog.

        Raises:
            ConfigError: an object is of no stratum, or there are too many.
        """
        objects = self._objects.among(listed)
        self._look(objects)
        starts = self._population.starts(listed)
        strata = self._strata.values[:objects]
        order = np.argsort(strata, kind="stable")
        ends = np.cumsum(np.diff(starts)[order])
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

        owned = self._population.owned(listed, lanes)
        own_parts = self._population.own_parts(listed, lanes)
        own = np.zeros(len(self._numbers), np.int64)
        np.add.at(own, strata, own_parts)
        natural = own
        if self._by_objects:
            natural = np.bincount(strata[own_parts > 0], minlength=len(own))
        return EditionStrata(
            tuple(self._numbers),
            np.diff(bounds),
            own,
            natural,
            place,
            starts_of,
            None if owned is None else lambda stratum, local: owned(place(stratum, local)),
        )

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
