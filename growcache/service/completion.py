"""What the shell offers after Tab: caches, config files, settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from growcache.service.words import as_size

CONFIG_SUFFIXES = (".yaml", ".yml")
LARGE = 1_000_000  # such a number is one of bytes
INDEX = "index.sqlite"  # named here: a Tab must not wait for the cache's own modules


def complete_cache(incomplete: str) -> list[str]:
    """Return caches, and the folders on the way to one."""
    return _open_ended(incomplete, _caches)


def complete_config(incomplete: str) -> list[str]:
    """Return YAML files, and the folders on the way to one."""
    return _open_ended(incomplete, _configs)


def complete_setting(incomplete: str) -> list[str]:
    """Return ``section.key=`` of every setting that begins so; of a single one its default."""
    from pydantic import BaseModel

    from growcache.config import CacheConfig, SamplingConfig, SourceConfig

    models: dict[str, type[BaseModel]] = {
        "source": SourceConfig,
        "sampling": SamplingConfig,
        "cache": CacheConfig,
    }
    found = {
        f"{name}.{key}=": "…" if field.is_required() else _shown(field.get_default())
        for name, model in models.items()
        for key, field in model.model_fields.items()
        if f"{name}.{key}=".startswith(incomplete)
    }
    if len(found) != 1:
        return list(found)
    ((key, default),) = found.items()
    return [key, f"{key}{default}"]


def _shown(default: object) -> str:
    if isinstance(default, int) and default >= LARGE:
        return as_size(default)
    return "null" if default is None else str(default).replace(" ", "")


def _caches(incomplete: str) -> list[str]:
    return [
        found if (path / INDEX).exists() else f"{found}/"
        for path, found in _beginning(incomplete)
        if path.is_dir()
    ]


def _configs(incomplete: str) -> list[str]:
    return [
        f"{found}/" if path.is_dir() else found
        for path, found in _beginning(incomplete)
        if path.is_dir() or path.suffix in CONFIG_SUFFIXES
    ]


def _open_ended(incomplete: str, offered: Callable[[str], list[str]]) -> list[str]:
    """Return what is offered; of a single folder also what is in it.

    For a shell that finds a single word takes that to be all, and puts a space behind it.
    """
    found = offered(incomplete)
    if len(found) == 1 and found[0].endswith("/"):
        found += offered(found[0])
    return found


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
