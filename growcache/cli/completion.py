"""Completion with Tab: configs, caches and settings.

If a function returns nothing, the shell completes any path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from growcache.humanize import as_size

CONFIG_SUFFIXES = (".yaml", ".yml")
MOST_ENTRIES = 2_000  # entries read per folder, so that Tab stays quick
MIN_SIZE = 1_000_000  # a default from this size on is a number of bytes


def complete_path() -> list[str]:
    """Offer nothing, so that the shell completes the path."""
    return []


def complete_config(incomplete: str) -> list[str]:
    """Return the configs in the typed folder, and in the folders below it."""
    return _complete(incomplete, _is_config)


def complete_cache(incomplete: str) -> list[str]:
    """Return the caches in the typed folder, and in the folders below it."""
    return _complete(incomplete, _is_cache)


def complete_code(incomplete: str) -> list[tuple[str, str]]:
    """Return error codes with their titles."""
    from growcache.cli.explain import explanations

    found = explanations().values()
    return [(one.code, one.title) for one in found if one.code.startswith(incomplete.upper())]


def complete_setting(incomplete: str) -> list[str]:
    """Return ``section.key=`` of every matching setting, and the default of a single match."""
    from pydantic import BaseModel

    from growcache.config import CacheConfig, SamplingConfig
    from growcache.config_source import SourceConfig

    models: dict[str, type[BaseModel]] = {
        "source": SourceConfig,
        "sampling": SamplingConfig,
        "cache": CacheConfig,
    }
    found = {
        f"{name}.{key}=": "…" if field.is_required() else _default_text(field.get_default())
        for name, model in models.items()
        for key, field in model.model_fields.items()
        if f"{name}.{key}=".startswith(incomplete)
    }
    if len(found) != 1:
        return list(found)
    ((key, default),) = found.items()
    return [key, f"{key}{default}"]


def _default_text(default: object) -> str:
    if isinstance(default, int) and default >= MIN_SIZE:
        return as_size(default)
    return "null" if default is None else str(default).replace(" ", "")


def _complete(incomplete: str, matches: Callable[[Path], bool]) -> list[str]:
    folder, name = os.path.split(incomplete)
    found = islice(_entries(Path(folder or "."), name), MOST_ENTRIES)
    return sorted(os.path.join(folder, path) for path, where in found if matches(where))  # noqa: PTH118 - "./" stays


def _entries(folder: Path, start: str) -> Iterator[tuple[str, Path]]:
    """Yield the entries of a folder whose names have a start, and those of its subfolders.

    Each comes with its path in the folder.
    """
    for entry in _scan(folder):
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start):
            continue
        path = Path(entry.path)
        yield entry.name, path
        if entry.is_dir():
            yield from ((f"{entry.name}/{one.name}", Path(one.path)) for one in _scan(path))


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder.expanduser()) as entries:
            return list(islice(entries, MOST_ENTRIES))
    except OSError:
        return []


def _is_config(path: Path) -> bool:
    return path.suffix in CONFIG_SUFFIXES


def _is_cache(path: Path) -> bool:
    from growcache.cache.files import FIRST_GENERATION, MARKER

    return (path / MARKER).is_file() or os.path.lexists(path / FIRST_GENERATION)
