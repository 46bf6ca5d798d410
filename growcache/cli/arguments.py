"""Arguments shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from growcache.cli.completion import complete_cache, complete_config, complete_setting

CacheArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CACHE",
        help="The cache's folder.",
        file_okay=False,
        autocompletion=complete_cache,
    ),
]
ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="The config file.",
        readable=False,  # load_config says why it cannot be read
        autocompletion=complete_config,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting. Repeatable.",
        autocompletion=complete_setting,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
