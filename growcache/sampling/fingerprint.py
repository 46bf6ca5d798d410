"""The settings that can change a byte of a shard, as values to compare and as one hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.side_files import Identity
from growcache.config import Config
from growcache.config_source import SourceConfig
from growcache.config_text import to_json_value
from growcache.sampling.messages import FOLDER_CLASSES, FORMAT, LABELS, TRANSFORM
from growcache.sampling.sizing import Sizing, sizing_values
from growcache.schema import Schema
from growcache.secrecy import hash_secrets, url_without_secrets

DRAW_VERSION = 3  # part of the fingerprint; raise it if any draw changes


# The storage_options that choose the server. The others are credentials and client settings.
_DATED_FOLDER = re.compile(r"/\d{4}-\d\d-\d\dT\d\d-\d\dZ?/")
SERVER_OPTIONS = frozenset(
    {"endpoint_url", "endpoint", "base_url", "account_name", "host", "port", "client_kwargs"}
)


def identify(
    config: Config,
    schema: Schema,
    sizing: Sizing,
    digests: Mapping[str, str | None],
    sizes: Mapping[str, Any],
    text_digests: Mapping[str, str | None] = MappingProxyType({}),
) -> Identity:
    """Return the identity of the cache that this configuration fills (protocol 4).

    Earlier versions used the digest of the text of the user's code, so the fingerprint with
    ``text_digests`` is an alias. Credentials, workers, concurrency and bounds are left out
    deliberately: they change when and where samples are drawn, but not which. The node is left
    out, because every edition records its lanes.
    """
    parts = configured_values(config) | {
        name: digests.get(name) for name in (TRANSFORM, FORMAT)
    }
    if any(source.labels is not None for source in config.sources):
        parts[LABELS] = digests.get(LABELS)
    parts["schema"] = str(schema)
    # A listing decided them, so a later one may number them differently.
    if FOLDER_CLASSES in sizes:
        parts["the folders that are classes"] = sizes[FOLDER_CLASSES]
    measured = sizing_values(sizing)
    parts |= {f"sampling.{name}": value for name, value in measured.items()}
    by_text = {name: text for name, text in text_digests.items() if text != parts[name]}
    return Identity(
        _hash(parts),
        orjson.loads(_canonical(parts)),
        schema.to_json(),
        {**measured, **sizes},
        {_hash(parts | by_text): by_text} if by_text else {},
    )


def _canonical(parts: dict[str, Any]) -> bytes:
    return orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)


def _hash(parts: dict[str, Any]) -> str:
    return hashlib.blake2b(_canonical(parts), digest_size=16).hexdigest()


def configured_values(config: Config) -> dict[str, Any]:
    """Return the parts that only the configuration determines, as JSON, to compare with a cache."""
    sampling = config.sampling
    parts: dict[str, Any] = to_json_value(
        {
            "sampling.seed": sampling.seed,
            "sampling.order": sampling.order,
            "sampling.weight_by": sampling.weight_by,
            "sampling.schema": sampling.schema,
            "sampling.transform": sampling.transform,
            "sampling.transform_options": hash_secrets(sampling.transform_options),
            "cache.format": config.cache.format,
            "layout version": CACHE_FORMATS[config.cache.format].LAYOUT_VERSION,
            "cache.max_samples": config.cache.max_samples,
            "draw version": DRAW_VERSION,
        }
        | _sources(config)
        | _chosen(config)
    )
    return parts


def _sources(config: Config) -> dict[str, Any]:
    """Return the sources.

    The action for missing fields or labels is left out, because no sample depends on it.
    """
    if config.weights is None:
        return {f"source.{name}": value for name, value in _source(config.sources[0]).items()}
    pairs = enumerate(zip(config.sources, config.weights, strict=True))
    return {
        f"source.{number}.{name}": value
        for number, (source, weight) in pairs
        for name, value in {**_source(source), "weight": weight}.items()
    }


def _source(source: SourceConfig) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "format": source.format,
        "options": hash_secrets(source.options),
        "storage_options": server_options(source.storage_options),
    }
    if source.fields:
        # As a list, because their order matters, and mappings are compared without it.
        parts["fields"] = [
            [name, url_without_secrets(field.url), field.format, hash_secrets(field.options)]
            for name, field in source.fields.items()
        ]
    else:
        parts["url"] = [url_without_secrets(url) for url in source.url]
    if source.names is not None:
        parts["names"] = list(source.names)
    if source.manifest is not None:
        # Inventories have a new folder each day.
        url = _DATED_FOLDER.sub("/*/", url_without_secrets(source.manifest.url))
        parts["manifest"] = source.manifest.model_dump(exclude_defaults=True) | {"url": url}
    if source.labels is not None:
        url = url_without_secrets(source.labels.url)
        parts["labels"] = source.labels.model_dump(mode="json", exclude_none=True) | {
            "url": url
        }
    return parts


def _chosen(config: Config) -> dict[str, Any]:
    """Return the settings that favour some objects."""
    sections = {"split": config.split, "sampling.strata": config.sampling.strata}
    return {
        f"{name}.{key}": value
        for name, section in sections.items()
        if section is not None
        for key, value in section.model_dump().items()
    }


def server_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that choose the server, because buckets of one name may be on several."""
    found: dict[str, Any] = {}
    for name in sorted(SERVER_OPTIONS & options.keys()):
        value = options[name]
        if isinstance(value, Mapping):  # fsspec passes client_kwargs on
            found |= server_options(value)
        elif isinstance(value, str):
            address = re.split(r"[?#]", value)[0]  # a query may be a signature
            found[name] = re.sub(r"^([^/]*//)?[^/]*@", r"\1", address).rstrip("/")
        elif isinstance(value, int):
            found[name] = value
    return found
