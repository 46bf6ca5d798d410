"""``growcache peek --refetch``: make a cached sample again from the store, and compare.

A sample is a function of its object, the seed and the configuration. Other bytes mean another
configuration or transform, an object that was rewritten in place, or damage.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import typer

from growcache.cache.files import CacheLayout
from growcache.cache.side_files import Identity, describe_differences, read_identity
from growcache.cache.stored_samples import StoredSample
from growcache.cli.peek import sample_at
from growcache.cli.terminal import fold_to_width, print_json, spinner
from growcache.config import Config
from growcache.config_text import from_json_value, load_config
from growcache.errors import (
    CacheMissingError,
    ConfigError,
    FingerprintError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
)
from growcache.formats.base import Visit, read_partly
from growcache.loading.waiting import shown_generation
from growcache.sampling.fill import WEIGHT, GroupFiller, load_transform
from growcache.sampling.fingerprint import configured_values
from growcache.sampling.labels import Labels, read_labels
from growcache.sampling.messages import (
    FOLDER_CLASSES,
    LABELS,
    PartVisit,
    Permit,
    fields_to_follow,
)
from growcache.sampling.sizing import takes_some_samples
from growcache.sampling.sources import open_sources
from growcache.schema import Sample, Value
from growcache.secrecy import url_without_secrets
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry, StoredObject
from growcache.store.store import RemoteStore
from growcache.store.urls import (
    BUCKET_SCHEMES,
    LOCAL_SCHEMES,
    SSH_SCHEMES,
    UrlTemplate,
    parse_url,
)
from growcache.usercode import short_key

# Their clients run no code from a URL or an object.
SAFE_SCHEMES = BUCKET_SCHEMES | SSH_SCHEMES | LOCAL_SCHEMES
TRANSFORM_DIGEST = "the transform's source"


def refetch_sample(root: Path, place: str, config: Path | None, *, json: bool) -> int:
    root = shown_generation(root)
    peeked = sample_at(root, place)
    identity = read_identity(root)
    if identity is None:
        raise CacheMissingError(f"the cache at {root} does not record what it was filled from")
    settings = (
        load_config(config, environment=os.environ)
        if config
        else config_from_identity(identity, root)
    )
    try:
        with spinner(sys.stderr, f"reading {short_key(peeked.origin.key)} …"):
            verdict, reason = _compare_with_store(root, peeked, settings, identity)
    except StoreError as error:
        if config is not None:
            raise
        raise type(error)(
            f"{error}; the cache stores no endpoint and no credentials: add --config CONFIG",
            code=error.code,
        ) from None
    if json:
        value = {"shard": peeked.shard, "i": peeked.i, "refetched": verdict, "why": reason}
        print_json(orjson.dumps(value | {"key": peeked.origin.key}))
    else:
        text = f"sample {peeked.shard}:{peeked.i} is {verdict}: {reason}"
        typer.echo(fold_to_width(text, sys.stdout))
    return 0 if verdict == "equal" else 1


def config_from_identity(identity: Identity, root: Path) -> Config:
    """Return a cache's own configuration.

    Raises:
        ConfigError: It names code, which another person may have chosen.
    """
    values: dict[str, Any] = {"cache": {"path": str(root)}, "sampling": {}}
    sources: dict[str, dict[str, Any]] = {}
    for dotted, value in filter(_decides_samples, identity.parts.items()):
        section, key = dotted.split(".", 1)
        number, _, setting = key.rpartition(".")
        place = sources.setdefault(number, {}) if section == "source" else values["sampling"]
        if setting == "fields":
            value = {
                name: {"url": url, "format": form, "options": options}
                for name, url, form, options in value
            }
        place[setting] = value
    mixed = [sources[number] for number in sorted(sources, key=lambda n: int(n or 0))]
    values["source"] = mixed[0] if "" in sources else mixed
    config = load_config(from_json_value(values))
    if named := "; ".join(f"{key}: {value}" for key, value in named_code(config)):
        raise ConfigError(
            f"the cache {root} names code that would run here ({named}); name your own "
            "configuration of the cache, so that only your code runs: add --config CONFIG",
            code="GC105",
        )
    return config


def named_code(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings that run code, or a client that may run code."""
    if config.sampling.transform is not None:
        yield "sampling.transform", config.sampling.transform
    for source in config.sources:
        for form, options in source.formats:
            if ":" in form:
                yield "source.format" if source.dataset is None else "source.dataset", form
            if ":" in str(options.get("decode")):
                yield "source.options.decode", str(options["decode"])
        urls = [
            *(() if source.dataset else source.url),
            *([source.labels.url] if source.labels else []),
        ]
        yield from (
            ("source.url", url) for url in urls if parse_url(url).scheme not in SAFE_SCHEMES
        )


def _decides_samples(part: tuple[str, Any]) -> bool:
    return re.sub(r"^source\.\d+\.", "source.", part[0]) in _DECIDING_SETTINGS


_SOURCE_SETTINGS = ("url", "fields", "format", "options", "labels", "names")
_DECIDING_SETTINGS = frozenset(
    {f"source.{name}" for name in (*_SOURCE_SETTINGS, "weight")}
    | {f"sampling.{name}" for name in ("seed", "weight_by", "transform", "transform_options")}
)


def _compare_with_store(
    root: Path, peeked: StoredSample, config: Config, identity: Identity
) -> tuple[str, str]:
    ours = dict(filter(_decides_samples, configured_values(config).items()))
    theirs = dict(filter(_decides_samples, identity.parts.items()))
    if differing := describe_differences(theirs, ours):
        raise FingerprintError(
            f"the cache was filled by another configuration: {'; '.join(differing)}"
        )
    labels = _read_labels(config, identity)
    key = peeked.origin.key
    try:
        again = asyncio.run(_draw_again(root, peeked, config, identity, labels))
    except ObjectMissingError as error:
        return "gone", str(error)
    except ObjectChangedError as error:
        return "changed", str(error)
    if not again:
        return "different", f"{key} no longer yields a sample at this place"
    differing = min((differences(peeked.sample, sample) for sample in again), key=len)
    if differing:
        return "different", "; ".join(differing)
    return "equal", f"drawn again from {key}, it is the same, byte for byte"


def _read_labels(config: Config, identity: Identity) -> Labels | None:
    urls = [source.labels.url for source in config.sources if source.labels is not None]
    folders = identity.sizes.get(FOLDER_CLASSES, ())
    if not urls and not folders:
        return None
    labels = read_labels(config.sources, config.sampling.timeout_seconds)
    if folders:
        labels.add_folders(folders)
    if urls and labels.digest != identity.parts.get(LABELS):
        raise FingerprintError(
            f"{' or '.join(map(url_without_secrets, urls))} has changed since the cache was "
            "filled"
        )
    return labels


async def _draw_again(
    root: Path,
    peeked: StoredSample,
    config: Config,
    identity: Identity,
    labels: Labels | None,
) -> list[Sample]:
    here = str(Path.cwd())
    if here not in sys.path:  # samplers find the user's code here, too
        sys.path.insert(0, here)
    sampling = config.sampling
    transform = load_transform(sampling.transform, sampling.transform_options, sampling.seed)
    digests = transform.digest if transform else (None,)  # of its syntax, and of its text
    known = {
        parts.get(TRANSFORM_DIGEST) for parts in (identity.parts, *identity.aliases.values())
    }
    if known.isdisjoint(digests):
        raise FingerprintError(
            f"the source of {sampling.transform} has changed since the cache was filled"
        )
    sources = open_sources(config.sources, timeout_seconds=sampling.timeout_seconds)
    if (names := fields_to_follow(identity)) is not None:
        sources.follow_fields(names)
    sidecar, origins = peeked.sidecar, peeked.sidecar.origins
    entry = origins.entry(peeked.i)
    round_ = origins.round[peeked.i] if origins.round else None
    visit = PartVisit(entry, origins.part[peeked.i], origins.parts[peeked.i], round_)
    if labels is not None:
        (joined,) = labels.joined([visit.entry.store], [visit.entry.key])
        visit = replace(visit, joined=joined)
    take = identity.sizes["samples_per_object"] if takes_some_samples(sampling) else None
    permit = Permit(
        "refetch", sidecar.group, sidecar.edition, sidecar.round, (), (visit,), take
    )
    format_visit = Visit(
        visit.part, visit.parts, permit.round if round_ is None else round_, sampling.seed, take
    )
    weighted = WEIGHT in identity.schema.names
    if weighted:  # it depends on the whole listing of that time, rather than on the object
        visit = replace(visit, weight=float(np.asarray(peeked.sample[WEIGHT])))
    filler = GroupFiller(sources, transform, sampling.seed, 1, weighted=weighted)
    try:
        reader = sources.reader(visit.entry)
        first = visit.entry.store - reader.entry.store  # among the URLs of all sources
        reader = replace(reader, others=await joined_objects_of(root, reader, first))
        found, _ = await read_partly(sources.format_of(visit.entry), reader, format_visit)
        visited = filler.prepared(permit, visit, found, identity.schema)
    finally:
        await sources.close()
    place = (peeked.origin.start, peeked.origin.stop)
    pairs = zip(visited.samples, visited.origins, strict=True)
    return [sample for sample, origin in pairs if origin == place]


def differences(cached: Sample, again: Sample) -> list[str]:
    texts = {name: _difference_text(value, again.get(name)) for name, value in cached.items()}
    return [
        f"{name}: the cached and the redrawn value differ{text}"
        for name, text in texts.items()
        if text is not None
    ]


def _difference_text(a: Value, b: Value | None) -> str | None:
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return None if type(a) is type(b) and a == b else ""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f" ({a.dtype.name}{list(a.shape)}, {b.dtype.name}{list(b.shape)})"
    if a.tobytes() == b.tobytes():
        return None
    return f" in {np.count_nonzero(a != b)} of {a.size} values"


async def joined_objects_of(root: Path, reader: StoredObject, first: int) -> tuple[Entry, ...]:
    """Return the objects of the other fields as listed, or else as they are now.

    A shard names only the first field's object.
    """
    store = reader.store
    if not isinstance(store, RemoteStore):  # an index of a Dataset
        return ()
    templates = [UrlTemplate.from_url(field.url) for field in store.source.fields.values()]
    values = templates[0].values(reader.entry.key) if templates else None
    if values is None:
        return ()
    others = [(n, other.render(values)) for n, other in enumerate(templates[1:], 1)]
    wanted = {(first + n, store.key_of_field(n, below)): n for n, below in others}
    found: dict[int, Entry] = {}
    path = CacheLayout(root).catalog
    if path.exists():  # an exported cache has none
        with Catalog.open(path, readonly=True) as catalog:
            pages = catalog.stores_and_keys(0, len(catalog))
            names = chain.from_iterable(zip(*page, strict=True) for page in pages)
            for ordinal, name in enumerate(names):
                if name in wanted:
                    found[wanted[name]] = replace(catalog.entry(ordinal), store=wanted[name])
    return tuple([found.get(n) or await store.find_of_field(n, below) for n, below in others])
