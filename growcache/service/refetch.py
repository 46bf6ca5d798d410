"""``growcache peek --refetch``: make a cached sample again from the store, and compare.

A sample is a function of its object, the seed and the configuration. So bytes that differ
mean another configuration or transform, an object that was rewritten in place, or damage.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import typer
from rich.console import Console
from rich.text import Text

from growcache.cache.identity import Identity, describe_differences, read_identity
from growcache.cache.sidecar import Sidecar
from growcache.config import Config, load_config
from growcache.errors import (
    CacheMissingError,
    ConfigError,
    FingerprintError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
)
from growcache.plain import from_plain
from growcache.remote.formats import Visit, read_found
from growcache.remote.sources import open_sources
from growcache.remote.store import Entry
from growcache.remote.urls import BUCKETS, LOCAL, SSH, parse_url
from growcache.sampling.draws import DRAW_VERSION
from growcache.sampling.fill import WEIGHT, Filler
from growcache.sampling.fingerprint import LABELS, wishes
from growcache.sampling.messages import Permit, Stop
from growcache.sampling.mixed import AnyLabels, read_all_labels
from growcache.sampling.pace import Pace
from growcache.sampling.transforms import load_transform
from growcache.schema import Sample, Value
from growcache.secrecy import public_url
from growcache.service.partners import CHANGED, GONE, PartnerError, partners_of
from growcache.service.peeked import Peeked, sample_at
from growcache.service.terminal import folded, redraws
from growcache.usercode import short

OWN = BUCKETS | SSH | LOCAL  # schemes whose clients run nothing that a URL or an object says
SOURCE_OF_TRANSFORM = "the transform's source"


def refetch_sample(root: Path, place: str, config: Path | None, *, json: bool) -> int:
    """Print whether a sample can be made again as it is; return the exit code.

    Args:
        root: of the cache.
        place: "shard:i".
        config: what the cache is filled by; None: what the cache itself tells of it, which
            has no credentials and no endpoint, and must name no code.
        json: print an object instead of a sentence.

    Raises:
        CacheMissingError: there is no cache, or no sample in it yet.
        ConfigError: the cache names code that would have to run.
        FingerprintError: the configuration is not that of the cache.
        StoreError: the store does not answer.
    """
    peeked = sample_at(root, place)
    identity = read_identity(root)
    if identity is None:
        raise CacheMissingError(f"the cache at {root} does not tell what it was filled from")
    settings = (
        load_config(config, environment=os.environ)
        if config
        else without_code(config_of(identity, root), root)
    )
    try:
        with _waiting(peeked.origin.key):
            verdict, why = _verdict(root, peeked, settings, identity)
    except StoreError as error:
        if config is not None:
            raise
        raise type(error)(
            f"{error}; the cache tells of no endpoint and no credentials: add --config CONFIG"
        ) from None
    _tell(peeked, verdict, why, json=json)
    return 0 if verdict == "equal" else 1


def _waiting(key: str) -> AbstractContextManager[object]:
    """Say at a terminal what is waited for."""
    if not redraws(sys.stderr):
        return nullcontext()
    words = f"reading {short(key)} …"
    return Console(stderr=True).status(Text(words, no_wrap=True, overflow="ellipsis"))


def config_of(identity: Identity, root: Path) -> Config:
    """Return the part of the configuration that a cache's identity tells.

    Raises:
        ConfigError: it was written by another version of growcache.
    """
    values: dict[str, Any] = {"cache": {"path": str(root)}, "sampling": {}}
    sources: dict[str, dict[str, Any]] = {}
    for dotted, value in filter(_is_configured, identity.parts.items()):
        section, key = dotted.split(".", 1)
        number, _, setting = key.rpartition(".")
        place = sources.setdefault(number, {}) if section == "source" else values["sampling"]
        place[setting] = _fields(value) if setting == "fields" else value
    mixed = [sources[number] for number in sorted(sources, key=lambda n: int(n or 0))]
    return load_config(
        {**from_plain(values), "source": from_plain(mixed[0] if "" in sources else mixed)}
    )


def without_code(config: Config, root: Path) -> Config:
    """Return what a cache tells of its configuration, if making a sample by that runs no code.

    A cache is data: it may have come from somebody else, and whoever looks at it has not agreed
    to run what its files name.

    Raises:
        ConfigError: names the settings that would run code.
    """
    if named := "; ".join(f"{key}: {value}" for key, value in named_code(config)):
        raise ConfigError(
            f"the cache {root} names code that would run here ({named}); give the configuration "
            "that you fill it by, whose code is yours: add --config CONFIG"
        )
    return config


def named_code(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings of a configuration that run code, or a client which may run some."""
    if config.sampling.transform is not None:
        yield "sampling.transform", config.sampling.transform
    for source in config.sources:
        for form, options in source.formats:
            if ":" in form:
                yield "source.format", form
            if ":" in str(options.get("decode")):
                yield "source.options.decode", str(options["decode"])
        urls = [*source.url, *([source.labels.url] if source.labels else [])]
        yield from (("source.url", url) for url in urls if parse_url(url).scheme not in OWN)


def _fields(values: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the fields of a source as they are configured."""
    return {
        name: {"url": url, "format": form, "options": options}
        for name, url, form, options in values
    }


def _is_configured(part: tuple[str, Any]) -> bool:
    """Whether a part of an identity is a setting that decides what an object yields."""
    return re.sub(r"^source\.\d+\.", "source.", part[0]) in _CONFIGURED


_CONFIGURED = frozenset(
    {f"source.{name}" for name in ("url", "fields", "format", "options", "labels", "weight")}
    | {f"sampling.{name}" for name in ("seed", "weight_by", "transform", "transform_options")}
)


def _verdict(root: Path, peeked: Peeked, config: Config, identity: Identity) -> tuple[str, str]:
    _require_same(config, identity)
    labels = _labels(config, identity)
    try:
        again = asyncio.run(_made_again(root, peeked, config, identity, labels))
    except PartnerError as error:
        return error.verdict, error.why
    except ObjectMissingError:
        return "gone", GONE.format(peeked.origin.key)
    except ObjectChangedError:
        return "changed", CHANGED.format(peeked.origin.key)
    if not again:
        return "different", f"{peeked.origin.key} yields no sample at this place any more"
    differing = min((differences(peeked.sample, sample) for sample in again), key=len)
    if not differing:
        return "equal", f"made again from {peeked.origin.key}, it is the same, byte for byte"
    return "different", "; ".join(differing)


def _require_same(config: Config, identity: Identity) -> None:
    """Refuse a configuration that yields other samples.

    Raises:
        FingerprintError: names the settings.
    """
    ours = dict(filter(_is_configured, wishes(config).items()))
    theirs = dict(filter(_is_configured, identity.parts.items()))
    if differing := describe_differences(theirs, ours):
        raise FingerprintError(
            f"the cache was filled by another configuration: {'; '.join(differing)}"
        )


def _labels(config: Config, identity: Identity) -> AnyLabels | None:
    """Return what was joined to the samples.

    Raises:
        ConfigError: the table cannot be used any more.
        FingerprintError: it is another one now.
    """
    urls = [source.labels.url for source in config.sources if source.labels is not None]
    if not urls:
        return None
    labels = read_all_labels(config.sources, config.sampling.timeout_seconds)
    if labels.digest != identity.parts.get(LABELS):
        raise FingerprintError(
            f"{' or '.join(map(public_url, urls))} was changed since the cache was filled"
        )
    return labels


async def _made_again(
    root: Path, peeked: Peeked, config: Config, identity: Identity, labels: AnyLabels | None
) -> list[Sample]:
    """Return the samples that the visit of this sample yields at its place, mostly one."""
    here = str(Path.cwd())
    if here not in sys.path:  # where samplers find the user's code, too
        sys.path.insert(0, here)
    sampling = config.sampling
    transform = load_transform(sampling.transform, sampling.transform_options, sampling.seed)
    digest = transform.digest if transform else None
    if digest != identity.parts.get(SOURCE_OF_TRANSFORM):
        raise FingerprintError(
            f"the source of {sampling.transform} was changed since the cache was filled"
        )
    sources = open_sources(config.sources, timeout_seconds=sampling.timeout_seconds)
    stop = stop_of(peeked.sidecar, peeked.i)
    if labels is not None:
        (joined,) = labels.joined([stop.entry.store], [stop.entry.key])
        stop = replace(stop, joined=joined)
    # Caches whose objects take turns are of a later version; of the first one, visits took some.
    taken = sampling.weight_by == "objects" and identity.parts["draw version"] == DRAW_VERSION
    take = identity.sizes["samples_per_object"] if taken else None
    sidecar = peeked.sidecar
    permit = Permit("refetch", sidecar.group, sidecar.edition, sidecar.round, (), (stop,), take)
    round_ = permit.round if stop.round is None else stop.round
    visit = Visit(stop.part, stop.parts, round_, sampling.seed, take)
    weighted = WEIGHT in identity.schema.names
    if weighted:  # it follows from all that was listed then, not from the object
        stop = replace(stop, weight=float(np.asarray(peeked.sample[WEIGHT])))
    filler = Filler(sources, transform, sampling.seed, 1, Pace(None), weighted=weighted)
    try:
        reader = sources.reader(stop.entry)
        first = stop.entry.store - reader.entry.store  # among the URLs of all sources
        reader = replace(reader, others=await partners_of(root, reader, first))
        found, _ = await read_found(sources.format_of(stop.entry), reader, visit)
        visited = filler.prepared(permit, stop, found, identity.schema)
    finally:
        await sources.close()
    place = (peeked.origin.start, peeked.origin.stop)
    pairs = zip(visited.samples, visited.origins, strict=True)
    return [sample for sample, origin in pairs if origin == place]


def stop_of(sidecar: Sidecar, i: int) -> Stop:
    """Return the visit that yielded sample ``i`` of a shard."""
    origins = sidecar.origins
    o = origins.object[i]
    store = origins.stores[o] if origins.stores else 0
    entry = Entry(origins.keys[o], origins.sizes[o], origins.etags[o], origins.mtimes[o], store)
    round_ = origins.round[i] if origins.round else None
    return Stop(entry, origins.part[i], origins.parts[i], round_)


def differences(cached: Sample, again: Sample) -> list[str]:
    """Return a sentence for every field whose bytes differ."""
    return [
        f"{name}: cached and made again differ{_by(value, again.get(name))}"
        for name, value in cached.items()
        if _bytes_of(value) != _bytes_of(again.get(name))
    ]


def _bytes_of(value: Value | None) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value


def _by(a: Value, b: Value | None) -> str:
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return ""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f" ({a.dtype.name}{list(a.shape)}, {b.dtype.name}{list(b.shape)})"
    return f" in {np.count_nonzero(a != b)} of {a.size} values"


def _tell(peeked: Peeked, verdict: str, why: str, *, json: bool) -> None:
    if not json:
        told = f"sample {peeked.shard}:{peeked.i} is {verdict}: {why}"
        typer.echo(folded(told, sys.stdout))
        return
    value = {"shard": peeked.shard, "i": peeked.i, "refetched": verdict, "why": why}
    value |= {"key": peeked.origin.key}
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
    sys.stdout.buffer.flush()
