"""How often objects and strata were drawn: their cached samples and their uses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any, NamedTuple

from growcache.cache.files import CacheLayout
from growcache.cache.index.inspection import read_shard_columns
from growcache.cache.lease_views import read_leases
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError
from growcache.monitor.report import thinned
from growcache.usercode import printable

MOST_SHARDS = 2000  # sidecars to read, evenly spread; the rest is estimated
MOST_STRATA = 20
SHOWN_OBJECTS = 10
USE_CLASSES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # lower ends
UNNAMED = "(none)"


class DrawnShard(NamedTuple):
    samples: Counter[tuple[int, str]]  # by URL and key
    uses: int


@dataclass(slots=True)
class Stratum:
    name: str
    objects: int = 0
    samples: int = 0
    deliveries: int = 0

    @property
    def uses(self) -> float:
        return self.deliveries / max(1, self.samples)


@dataclass(frozen=True, slots=True)
class DrawnObjects:
    """The objects of the cached samples. ``share`` of the shards were read."""

    objects: int = 0
    samples: int = 0
    median_samples: float = 0.0  # of an object
    most_samples: int = 0
    most_drawn: list[tuple[str, int]] = field(default_factory=list)
    strata_are: str = ""
    strata: list[Stratum] = field(default_factory=list)
    uses: list[tuple[str, int]] = field(default_factory=list)  # samples, by number of uses
    share: float = 1.0


def count_objects(
    shards: Iterable[DrawnShard], name_of: Callable[[int, str], str], strata_are: str
) -> DrawnObjects:
    """Count samples by object and stratum."""
    samples, deliveries = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    uses: Counter[int] = Counter()
    for shard in shards:
        samples.update(shard.samples)
        uses[shard.uses] += shard.samples.total()
        for identity, count in shard.samples.items():
            deliveries[identity] += count * shard.uses
    strata: dict[str, Stratum] = {}
    for identity, count in samples.items():
        one = strata.setdefault(name := name_of(*identity), Stratum(name))
        one.objects, one.samples = one.objects + 1, one.samples + count
        one.deliveries += deliveries[identity]
    ordered = sorted(strata.values(), key=lambda one: -one.samples)
    return DrawnObjects(
        objects=len(samples),
        samples=samples.total(),
        median_samples=median(samples.values()) if samples else 0.0,
        most_samples=max(samples.values(), default=0),
        most_drawn=[(printable(key), n) for (_, key), n in samples.most_common(SHOWN_OBJECTS)],
        strata_are=strata_are,
        strata=_with_others(ordered),
        uses=use_classes(uses),
    )


def _with_others(strata: list[Stratum]) -> list[Stratum]:
    if len(strata) <= MOST_STRATA:
        return strata
    shown, others = strata[: MOST_STRATA - 1], strata[MOST_STRATA - 1 :]
    sums = (sum(getattr(one, name) for one in others) for name in ("objects", "samples"))
    objects, samples = sums
    deliveries = sum(one.deliveries for one in others)
    return [*shown, Stratum(f"{len(others)} others", objects, samples, deliveries)]


def use_classes(uses: Mapping[int, int]) -> list[tuple[str, int]]:
    """Return samples by their number of uses.

    >>> use_classes({0: 5, 2: 7, 5: 1, 9: 1})
    [('0', 5), ('1', 0), ('2', 7), ('3', 0), ('4 to 5', 1), ('6 to 7', 0), ('8 to 11', 1)]
    """
    last = max(uses, default=0)
    found = []
    for low, high in zip(USE_CLASSES, [*USE_CLASSES[1:], None], strict=True):
        if low > last:
            break
        inside = sum(
            n for use, n in uses.items() if use >= low and (high is None or use < high)
        )
        end = "or more" if high is None else f"{low} to {high - 1}"
        name = f"{low} {end}" if high is None else str(low) if high == low + 1 else end
        found.append((name, inside))
    return found


def stratum_namer(parts: Mapping[str, Any]) -> tuple[Callable[[int, str], str], str]:
    """Return the function from an object to its stratum, and the kind of strata, of a cache.

    The origin of a sample has no columns of labels. So folders are shown for strata by a
    column, and without strata.
    """
    urls = parts.get("source.0.url")
    if urls is not None:
        names = [printable(", ".join(urls)) for urls in _urls_of_sources(parts)]
        return lambda store, _: names[store] if store < len(names) else UNNAMED, "source"
    by = str(parts.get("sampling.strata.by") or "")
    if "(?P<stratum>" in by:
        try:
            pattern = re.compile(by)
        except re.error:
            return _folder, "folder"
        return lambda _, key: _matched(pattern, key), "stratum"
    columns = (parts.get("source.labels") or {}).get("columns") or ()
    return _folder, "stratum" if by == "label" and by not in columns else "folder"


def _urls_of_sources(parts: Mapping[str, Any]) -> list[list[str]]:
    """Return the URLs of each URL's source.

    An object has the number of its URL, and a source may have several URLs.
    """
    found: list[list[str]] = []
    number = 0
    while (urls := parts.get(f"source.{number}.url")) is not None:
        found += [list(map(str, urls))] * len(urls)
        number += 1
    return found


def _matched(pattern: re.Pattern[str], key: str) -> str:
    match = pattern.search(key)
    return printable(match["stratum"] or UNNAMED) if match else UNNAMED


def _folder(_: int, key: str) -> str:
    return printable(PurePosixPath(key).parent.name or UNNAMED)


def read_drawn_objects(root: Path, parts: Mapping[str, Any]) -> DrawnObjects:
    """Read the sidecars of live shards. Raises the errors of `read_index`."""
    columns = read_shard_columns(root)
    uses = dict(zip(columns.numbers.tolist(), columns.uses.tolist(), strict=True))
    for lease in read_leases(root):
        if lease.job and lease.name not in columns.counted:
            for number in lease.used():
                uses[number] = uses.get(number, 0) + 1
    numbers = columns.numbers.tolist()
    chosen = thinned(numbers, MOST_SHARDS)
    layout = CacheLayout(root)
    shards = (
        DrawnShard(found, uses[number])
        for number in chosen
        if (found := _origins_of(layout, number)) is not None
    )
    counted = count_objects(shards, *stratum_namer(parts))
    return replace(counted, share=len(chosen) / len(numbers) if numbers else 1.0)


def _origins_of(layout: CacheLayout, number: int) -> Counter[tuple[int, str]] | None:
    try:
        origins = Sidecar.from_bytes(layout.sidecar(number).read_bytes()).origins
    except (OSError, CacheError):  # evicted meanwhile, or damaged
        return None
    identities = list(origins.identities)
    return Counter(identities[place] for place in origins.object)
