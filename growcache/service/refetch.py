"""``growcache peek --refetch``: make a cached sample again from the store, and compare.

A sample is a function of its object, the seed and the configuration. So bytes that differ
mean another configuration or transform, an object that was rewritten in place, or damage.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
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
    FingerprintError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
)
from growcache.remote.formats import Visit, open_source, read_found
from growcache.remote.store import Entry, RemoteStore, StoreReader, open_store
from growcache.remote.templates import Template
from growcache.remote.urls import parse_url
from growcache.sampling.fill import WEIGHT, Filler
from growcache.sampling.fingerprint import LABELS, wishes
from growcache.sampling.labels import Labels, read_labels
from growcache.sampling.messages import Permit, Stop
from growcache.sampling.pace import Pace
from growcache.sampling.transforms import load_transform
from growcache.schema import Sample, Value
from growcache.secrecy import public_url
from growcache.service.peeked import Peeked, sample_at
from growcache.service.terminal import folded, redraws
from growcache.usercode import short

SOURCE_OF_TRANSFORM = "the transform's source"


def refetch_sample(root: Path, place: str, config: Path | None, *, json: bool) -> int:
    """Print whether a sample can be made again as it is; return the exit code.

    Args:
        root: of the cache.
        place: "shard:i".
        config: what the cache is filled by; None: what the cache itself tells of it, which
            has no credentials and no endpoint.
        json: print an object instead of a sentence.

    Raises:
        CacheMissingError: there is no cache, or no sample in it yet.
        FingerprintError: the configuration is not that of the cache.
        StoreError: the store does not answer.
    """
    peeked = sample_at(root, place)
    identity = read_identity(root)
    if identity is None:
        raise CacheMissingError(f"the cache at {root} does not tell what it was filled from")
    settings = (
        load_config(config, environment=os.environ) if config else config_of(identity, root)
    )
    try:
        with _waiting(peeked.origin.key):
            verdict, why = _verdict(peeked, settings, identity)
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
    values: dict[str, dict[str, Any]] = {"cache": {"path": str(root)}}
    for dotted, value in identity.parts.items():
        section, _, key = dotted.partition(".")
        if section in ("source", "sampling") and dotted in _CONFIGURED:
            values.setdefault(section, {})[key] = value
    if "fields" in values["source"]:
        values["source"]["fields"] = {
            name: {"url": url, "format": form, "options": options}
            for name, url, form, options in values["source"]["fields"]
        }
    return load_config(values)


_CONFIGURED = frozenset(
    {
        "source.url",
        "source.fields",
        "source.format",
        "source.options",
        "sampling.seed",
        "sampling.weight_by",
    }
    | {"source.labels", "sampling.transform", "sampling.transform_options"}
)


def _verdict(peeked: Peeked, config: Config, identity: Identity) -> tuple[str, str]:
    _require_same(config, identity)
    labels = _labels(config, identity)
    try:
        again = asyncio.run(_made_again(peeked, config, identity, labels))
    except ObjectMissingError:
        return "gone", f"{peeked.origin.key} is not in the store any more"
    except ObjectChangedError:
        return "changed", f"{peeked.origin.key} was rewritten since it was sampled"
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
    wished = wishes(config)
    ours = {key: wished.get(key) for key in _CONFIGURED}
    theirs = {key: identity.parts.get(key) for key in _CONFIGURED}
    if differing := describe_differences(theirs, ours):
        raise FingerprintError(
            f"the cache was filled by another configuration: {'; '.join(differing)}"
        )


def _labels(config: Config, identity: Identity) -> Labels | None:
    """Return what was joined to the samples.

    Raises:
        ConfigError: the table cannot be used any more.
        FingerprintError: it is another one now.
    """
    if config.source.labels is None:
        return None
    labels = read_labels(config.source, config.sampling.timeout_seconds)
    if labels.digest != identity.parts.get(LABELS):
        raise FingerprintError(
            f"{public_url(config.source.labels.url)} was changed since the cache was filled"
        )
    return labels


async def _made_again(
    peeked: Peeked, config: Config, identity: Identity, labels: Labels | None
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
    store = open_store(config.source, timeout_seconds=sampling.timeout_seconds)
    format_ = open_source(config.source)
    stop = stop_of(peeked.sidecar, peeked.i, config.source.url)
    if labels is not None:
        (joined,) = labels.joined([stop.entry.store], [stop.entry.key])
        stop = replace(stop, joined=joined)
    take = identity.sizes["samples_per_object"] if sampling.weight_by == "objects" else None
    sidecar = peeked.sidecar
    permit = Permit("refetch", sidecar.group, sidecar.edition, sidecar.round, (), (stop,), take)
    round_ = permit.round if stop.round is None else stop.round
    visit = Visit(stop.part, stop.parts, round_, sampling.seed, take)
    weighted = WEIGHT in identity.schema.names
    if weighted:  # it follows from all that was listed then, not from the object
        stop = replace(stop, weight=float(np.asarray(peeked.sample[WEIGHT])))
    filler = Filler(store, format_, transform, sampling.seed, 1, Pace(None), weighted=weighted)
    try:
        partners = await _partners(store, stop.entry.key)
        reader = StoreReader(store, stop.entry, partners)
        found, _ = await read_found(format_, reader, visit)
        visited = filler.prepared(permit, stop, found, identity.schema)
    finally:
        await store.close()
    place = (peeked.origin.start, peeked.origin.stop)
    pairs = zip(visited.samples, visited.origins, strict=True)
    return [sample for sample, origin in pairs if origin == place]


async def _partners(store: RemoteStore, key: str) -> tuple[Entry, ...]:
    """Return the objects of the other fields as they are now: a shard tells of the first."""
    templates = [Template.of(field.url) for field in store.source.fields.values()]
    values = templates[0].values(key) if templates else None
    if values is None:
        return ()
    others = enumerate(templates[1:], 1)
    return tuple([await store.beside(n, other.rendered(values)) for n, other in others])


def stop_of(sidecar: Sidecar, i: int, urls: Sequence[str]) -> Stop:
    """Return the visit that yielded sample ``i`` of a shard."""
    origins = sidecar.origins
    o = origins.object[i]
    key = origins.keys[o]
    # Of several fields the first one's object is written down, which the first URL matches.
    matching = (n for n, url in enumerate(urls) if parse_url(url).matches(key))
    entry = Entry(key, origins.sizes[o], origins.etags[o], origins.mtimes[o], next(matching, 0))
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
