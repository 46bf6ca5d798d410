"""Arguments that several commands have, and what Tab completes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from growcache.humanize import as_size

MIN_SIZE = 1_000_000  # such a number is one of bytes


def complete_path() -> list[str]:
    """Offer nothing, so that the shell completes the path."""
    return []


def complete_setting(incomplete: str) -> list[str]:
    """Return ``section.key=`` of every matching setting; of a single one its default."""
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


CacheArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CACHE",
        help="The cache's folder.",
        file_okay=False,
        autocompletion=complete_path,
    ),
]
ConfigArgument = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="The config file.", autocompletion=complete_path),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting; repeatable.",
        autocompletion=complete_setting,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]
