"""What the shell offers after Tab: caches, config files, settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CONFIG_SUFFIXES = (".yaml", ".yml")
INDEX = "index.sqlite"  # named here: a Tab must not wait for the cache's own modules


def complete_cache(incomplete: str) -> list[str]:
    """Return caches, and the folders on the way to one."""
    return [
        found if (path / INDEX).exists() else f"{found}/"
        for path, found in _beginning(incomplete)
        if path.is_dir()
    ]


def complete_config(incomplete: str) -> list[str]:
    """Return YAML files, and the folders on the way to one."""
    return [
        f"{found}/" if path.is_dir() else found
        for path, found in _beginning(incomplete)
        if path.is_dir() or path.suffix in CONFIG_SUFFIXES
    ]


def complete_setting(incomplete: str) -> list[str]:
    """Return ``section.key=`` of every setting that begins so."""
    from pydantic import BaseModel

    from growcache.config import CacheConfig, SamplingConfig, SourceConfig

    models: dict[str, type[BaseModel]] = {
        "source": SourceConfig,
        "sampling": SamplingConfig,
        "cache": CacheConfig,
    }
    keys = (f"{name}.{key}=" for name, model in models.items() for key in model.model_fields)
    return [key for key in keys if key.startswith(incomplete)]


def _beginning(incomplete: str) -> Iterator[tuple[Path, str]]:
    """Yield what a half-typed path may mean, each also as the shell is to show it."""
    head, slash, start = incomplete.rpartition("/")
    folder = Path(head + slash or ".").expanduser()
    try:
        found = sorted(folder.iterdir())
    except OSError:  # no such folder, so there is nothing to offer
        return
    for path in found:
        if path.name.startswith(start) and (start or not path.name.startswith(".")):
            yield path, f"{head}{slash}{path.name}"
