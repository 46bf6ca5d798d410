"""The commands that take a config: their options and the texts of `--help`.

Each imports its modules when it runs, so that ``--help`` and Tab are quick.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Annotated

import typer

from growcache.cli.arguments import ConfigArgument, JsonOption, SetOption
from growcache.cli.terminal import signals_as_ctrl_c
from growcache.errors import ConfigError


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs to train.")] = 12,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Work in this new folder, and keep it."),
    ] = None,
    notebook: Annotated[
        bool,
        typer.Option("--notebook", help="Only write the tutorials' notebooks into a folder."),
    ] = False,
) -> None:
    """Watch a small cache grow while a PyTorch model trains on it (half a minute)."""
    folder = keep or (Path("growcache-tutorials") if notebook else None)
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a new folder with --keep", code="GC106")
    if notebook and folder is not None:
        from growcache.cli.tutorials import write_tutorials

        write_tutorials(folder)
        return
    from rich.console import Console

    from growcache.cli.demo import run_demo

    with signals_as_ctrl_c():
        run_demo(Console(), epochs=epochs, keep=keep)


def init(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="Where to write the config; - prints it.")
    ] = Path("growcache.yaml"),
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Where the objects are, with globs.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="Their format. Default: detect it."),
    ] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="The cache's folder.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The cache's bound, such as 50GB.")
    ] = None,
    endpoint_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The endpoint of an S3 store that is not Amazon's."),
    ] = None,
    anon: Annotated[bool, typer.Option("--anon", help="Read without credentials.")] = False,
    look: Annotated[
        bool, typer.Option(help="List the source and read the start of one object.")
    ] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask questions.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace the file. Guess if the source cannot be read."),
    ] = False,
) -> None:
    """Look at the objects, and write a config that explains every setting.

    At a terminal, it asks for settings that the options do not give.
    """
    from growcache.cli.init import InitOptions, init_config

    given = InitOptions(url, format_, cache, max_bytes, endpoint_url, anon, look, force)
    init_config(file, given, yes=yes)


def schema() -> None:
    """Print the JSON Schema of a config, so that editors can complete and check it."""
    import json

    from growcache.cli.config_schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=2, ensure_ascii=False))


def plan(
    config: ConfigArgument,
    consume: Annotated[
        str | None,
        typer.Option(
            metavar="N/s", help="Samples per second that training takes. Default: watch a job."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES/s", help="Bandwidth of all reads together. Default: measure it."
        ),
    ] = None,
    overrides: SetOption = None,
    horizon: Annotated[
        str,
        typer.Option(metavar="TIME", help="Predict coverage, reuse and more after this time."),
    ] = "1h",
    min_samples: Annotated[
        int | None,
        typer.Option("--min-samples", min=1, help="The loader's min_samples. Default: 1000."),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="REGION/CLASS",
            help="The store's region and class, or a YAML file with prices.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KEY=A,B,C", help="Compare several values of a setting."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict first batch, growth, reuse, coverage, requests, egress and cost of a config.

    It lists the source for some seconds, reads a few samples (at most some tens
    of MB), and simulates the service. Each figure is marked as measured, given
    or assumed.
    """
    from growcache.cli.plan import number_of, seconds_of, show_plan, size_of
    from growcache.monitor.plan_inputs import Given

    given = Given(
        None if consume is None else number_of("--consume", consume),
        None if link is None else size_of("--link", link),
        min_samples,
        seconds_of(horizon),
        price,
    )
    show_plan(config, overrides or (), given, sweep, json=json)


def run(
    config: ConfigArgument,
    overrides: SetOption = None,
    until_full: Annotated[
        bool, typer.Option("--until-full", help="Stop when the cache is full or complete.")
    ] = False,
    duration: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Stop after this time.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Stop after this number of draws in this run.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="List the store again, to find new objects.")
    ] = False,
    retry_holes: Annotated[
        bool,
        typer.Option("--retry-holes", help="Retry objects and samples that could not be read."),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace the samples of another configuration."),
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Also start the dashboard, in its own process."),
    ] = None,
) -> None:
    """Fill the cache, and keep it fresh, until Ctrl-C.

    It shows a live view on a terminal, and writes JSON lines elsewhere, with
    the keys of `status --json`: one at each change of state, one a second, and
    a last one whose state is stopped. Warnings and errors go to the error
    stream.
    """
    from growcache.cli.dashboard import dashboard_beside
    from growcache.cli.reporter_choice import choose_reporter
    from growcache.config_text import load_config
    from growcache.launcher import launched_node, with_launched_node
    from growcache.sampling.config_reload import ConfigFile
    from growcache.sampling.run_service import run_service

    settings = load_config(config, overrides or (), os.environ)
    if (launched := launched_node(settings)) is not None:
        typer.echo(f"growcache: {launched.words}", err=True)
        settings = with_launched_node(settings)
    file = ConfigFile(config, overrides or (), os.environ) if config.is_file() else None
    with dashboard_beside(settings.cache.path, http), choose_reporter() as shown:
        # Imported modules stay, so the collector need not look through them again.
        gc.freeze()
        run_service(
            settings,
            until_full=until_full,
            duration=duration,
            samples=samples,
            refresh=refresh,
            retry_holes=retry_holes,
            on_status=shown.show,
            on_stderr=shown.on_stderr,
            file=file,
            replace=replace,
        )


def doctor(
    config: ConfigArgument,
    overrides: SetOption = None,
    consume: Annotated[
        str | None,
        typer.Option(
            metavar="N/s", help="Samples per second that training takes. Default: watch a job."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure store, disk, memory and machine. Report faults and the bottleneck.

    It reads from the store for a few seconds, and writes a temporary file next
    to the cache. Exit code 1 if something is wrong.
    """
    from growcache.cli.doctor import show_doctor

    raise typer.Exit(show_doctor(config, overrides or (), consume, json=json))
