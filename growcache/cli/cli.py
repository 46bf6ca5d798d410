"""The commands, their options and examples, and shell completion.

Each command imports what it needs, so that ``--help`` and Tab are quick.
"""

from __future__ import annotations

import gc
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from growcache import __version__
from growcache.cli.examples import examples_epilog
from growcache.cli.terminal import (
    NO_COLOR,
    apply_no_color,
    can_redraw,
    fold_to_width,
    print_json,
    signals_as_ctrl_c,
)
from growcache.errors import ConfigError, GrowcacheError
from growcache.humanize import as_size

if TYPE_CHECKING:
    from growcache.cli.status import StatusReporter

REFRESH_SECONDS = 0.5

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


app = typer.Typer(
    name="growcache",
    help="A bounded local cache of random samples from object storage that grows while you "
    "train.\n\nExample: growcache demo",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What typer raises for bad usage; where its base class lives depends on typer's version.
UsageError: Any = typer.BadParameter.__mro__[1]
INTERRUPTED_EXIT_CODE = 130

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


@app.callback(invoke_without_command=True)
def _root_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    no_color: Annotated[
        bool, typer.Option(NO_COLOR, help="No colours; also after a command, or as NO_COLOR=1.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"growcache {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(epilog=examples_epilog("demo"))
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs to train.")] = 12,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Work in this new folder, and leave it behind."),
    ] = None,
) -> None:
    """Watch a small cache grow while a PyTorch model trains on it (half a minute)."""
    from rich.console import Console

    from growcache.cli.demo import run_demo
    from growcache.cli.terminal import signals_as_ctrl_c

    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"{keep} is not empty; name a folder that is new")
    with signals_as_ctrl_c():
        run_demo(Console(), epochs=epochs, keep=keep)


@app.command(epilog=examples_epilog("init"))
def init(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="Where to write it; - for the screen.")
    ] = Path("growcache.yaml"),
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Where the objects are, with globs.")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="What they hold, instead of a guess."),
    ] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where the cache is to be.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Its bound, such as 50GB.")
    ] = None,
    endpoint_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Of an S3 store that is not Amazon's.")
    ] = None,
    anon: Annotated[bool, typer.Option("--anon", help="Read without credentials.")] = False,
    look: Annotated[
        bool, typer.Option(help="List the source and read the start of one object.")
    ] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file; guess, if no look is possible.")
    ] = False,
) -> None:
    """Write a config that explains every setting, after a look at the objects.

    At a terminal it asks for what the options do not say.
    """
    from growcache.cli.init import InitOptions, init_config

    given = InitOptions(url, format_, cache, max_bytes, endpoint_url, anon, look, force)
    init_config(file, given, yes=yes)


@app.command(epilog=examples_epilog("schema"))
def schema() -> None:
    """Print the JSON Schema of a config, with which editors complete and check it."""
    import json

    from growcache.cli.config_schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=2, ensure_ascii=False))


@app.command("plan", epilog=examples_epilog("plan"))
def plan_command(
    config: ConfigArgument,
    consume: Annotated[
        str | None,
        typer.Option(
            metavar="N/s", help="Samples per second that training takes; else a job is watched."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="BYTES/s", help="Of all reads together; else it is measured."),
    ] = None,
    overrides: SetOption = None,
    horizon: Annotated[
        str, typer.Option(metavar="TIME", help="For which coverage, reuse and the like hold.")
    ] = "1h",
    min_samples: Annotated[
        int | None,
        typer.Option("--min-samples", min=1, help="As the loader gets it; 1000 if not given."),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(metavar="REGION/CLASS", help="Of the store, or a YAML file with prices."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KEY=A,B,C", help="Compare values of a setting."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Predict first batch, growth, reuse, coverage, requests, egress and cost of a config.

    It lists the source for some seconds, reads a few samples (at most some tens
    of MB), and simulates the service. Each figure says whether it is measured,
    given or assumed.
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


@app.command(epilog=examples_epilog("run"))
def run(
    config: ConfigArgument,
    overrides: SetOption = None,
    until_full: Annotated[
        bool, typer.Option("--until-full", help="End when the cache is full or complete.")
    ] = False,
    duration: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="End after so long.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="End after this number of draws in this run.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="List the store again, for new objects.")
    ] = False,
    retry_holes: Annotated[
        bool, typer.Option("--retry-holes", help="Try again what could not be read for good.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Let new samples replace those of another configuration."
        ),
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Start the dashboard, in a process of its own."),
    ] = None,
) -> None:
    """Fill the cache, and keep it fresh, until Ctrl-C: live on a terminal, else JSON lines.

    A line is an object with the keys of `status --json`: one at each change
    of state, one a second between, and a last one whose state is stopped.
    Warnings and errors go to the error stream.
    """
    from growcache.cli.dashboard import dashboard_beside
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
        # What was imported stays: to look through it again and again is in vain.
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


@app.command(epilog=examples_epilog("doctor"))
def doctor(
    config: ConfigArgument,
    overrides: SetOption = None,
    consume: Annotated[
        str | None,
        typer.Option(
            metavar="N/s", help="Samples per second that training takes; else a job's own."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure store, disk, memory and machine; say what is wrong and which one limits.

    It reads from the store for a few seconds, and writes a temporary file next to the cache.
    Exit code 1 where something is wrong.
    """
    from growcache.cli.doctor import show_doctor

    raise typer.Exit(show_doctor(config, overrides or (), consume, json=json))


@app.command(epilog=examples_epilog("status"))
def status(
    cache: CacheArgument,
    json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")
    ] = False,
) -> None:
    """Show how full a cache is, what its service does, and its readers."""
    from growcache.cache.status import read_status

    found = read_status(cache)  # a missing cache is an error at once, not an empty picture
    if watch:
        _watch_status(cache, json=json)
    elif json:
        print_json(found.to_json())
    else:
        from rich.console import Console

        from growcache.cli.view import StatusPicture

        Console().print(StatusPicture(found))


def _watch_status(cache: Path, *, json: bool) -> None:
    from growcache.cache.status import read_status
    from growcache.cli.status import json_lines

    with (
        suppress(KeyboardInterrupt),
        signals_as_ctrl_c(),
        json_lines() if json else choose_reporter() as shown,
    ):
        while True:
            shown.show(read_status(cache))
            time.sleep(REFRESH_SECONDS)


def choose_reporter(stream: TextIO | None = None) -> StatusReporter:
    from growcache.cli.status import json_lines, plain_lines

    stream = stream or sys.stdout
    if not stream.isatty():
        return json_lines(stream.buffer)
    if not can_redraw(stream):
        return plain_lines(stream)
    from rich.console import Console

    from growcache.cli.watch import LiveView

    return LiveView(Console(file=stream))


@app.command(epilog=examples_epilog("dashboard"))
def dashboard(
    caches: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CACHE...", help="Folders of caches.", autocompletion=complete_path
        ),
    ] = None,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where it listens.")
    ] = "127.0.0.1:8650",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Holds the token, instead of GROWCACHE_TOKEN.",
        ),
    ] = None,
    prefix: Annotated[
        str, typer.Option(metavar="PATH", help="Where a proxy shows it, such as /growcache.")
    ] = "/",
    grafana: Annotated[
        bool, typer.Option("--grafana", help="Print a dashboard for Grafana instead.")
    ] = False,
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print alert rules for Prometheus instead.")
    ] = False,
    listen_fd: Annotated[int | None, typer.Option("--listen-fd", hidden=True)] = None,
) -> None:
    """Show caches in a browser, and give their metrics to Prometheus, until Ctrl-C.

    It only reads, and no service need run. It listens on this machine's loopback; from
    elsewhere use ssh -L. Another address needs a token: each request must bring it.
    """
    from growcache.cli.dashboard import shipped_file, show_dashboard

    if grafana or alerts:
        typer.echo(shipped_file("grafana.json" if grafana else "alerts.yaml"), nl=False)
        return
    if not caches:
        raise ConfigError("name the folder of a cache: growcache dashboard ./cache")
    show_dashboard(caches, http, token_file=token_file, prefix=prefix, listen_fd=listen_fd)


@app.command(epilog=examples_epilog("check"))
def check(
    cache: CacheArgument,
    mend: Annotated[
        bool,
        typer.Option("--repair", help="Mend it; no service may run. Exit 0: all is mended."),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Verify every file, row and checksum of a cache; exit code 1 where anything is wrong.

    With --repair the index is made anew from the shards, and shards that are
    damaged are set aside, so that the next run draws them again.
    """
    from growcache.cli.check import show_check

    raise typer.Exit(show_check(cache, json=json, mend=mend))


@app.command(epilog=examples_epilog("peek"))
def peek(
    cache: CacheArgument,
    sample: Annotated[
        str | None, typer.Option(metavar="SHARD:I", help="Show this one sample.")
    ] = None,
    refetch: Annotated[
        bool,
        typer.Option("--refetch", help="Make it again from the store; exit 1 if it differs."),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Of the cache, where the store needs more than its URL, or samples code of yours.",
            autocompletion=complete_path,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what the samples of a cache look like, and which object each came from."""
    if config is not None and not refetch:
        raise ConfigError("--config is for --refetch; a look at the cache needs none")
    if not refetch:
        from growcache.cli.peek import peek_cache

        peek_cache(cache, sample, json=json)
        return
    if sample is None:
        raise ConfigError("--refetch needs --sample SHARD:I, such as 12:0")
    from growcache.cli.redraw_sample import refetch_sample

    raise typer.Exit(refetch_sample(cache, sample, config, json=json))


@app.command(epilog=examples_epilog("replay"))
def replay(
    config: ConfigArgument,
    journal: Annotated[
        Path,
        typer.Argument(
            metavar="JOURNAL",
            help="What the loader got as journal=.",
            autocompletion=complete_path,
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Which batch, over all epochs, from 0."),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Of several ranks, whose.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write its arrays, as .npz."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Keep shards that are drawn again there, for the next time."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Ask the store whether the objects were changed since.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Make a batch again that a loader with a journal delivered, and name its samples.

    Bit for bit: what is not cached any more is drawn again from the store, on
    this machine or another. A transform of the loader is not applied; in Python
    growcache.replay does that, too. Exit code 1 where objects were changed since.
    """
    from growcache.cli.replay import replay_step, show_steps

    if step is None:
        show_steps(journal, rank, json=json)
        return
    code = replay_step(
        config, journal, step, rank=rank, out=out, cache=cache, check=check, json=json
    )
    raise typer.Exit(code)


@app.command(epilog=examples_epilog("report"))
def report(
    cache: CacheArgument,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="The HTML file.")
    ] = Path("report.html"),
    svg: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also pictures without script, for papers."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What plan --json wrote, to compare with.",
            autocompletion=complete_path,
        ),
    ] = None,
) -> None:
    """Write a cache's history into one file that works offline: charts, limits, coverage, cost.

    It has a paragraph for a paper. Nothing is written into the cache.
    """
    from growcache.cli.report import write_report

    _print(write_report(cache, out, svg, plan))


@app.command(epilog=examples_epilog("export"))
def export(
    cache: CacheArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is new or empty.")],
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="The newest shards that hold this number, instead of all."),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="tfrecord or npy; else as it is."),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Let others read the copy, as your umask says.")
    ] = False,
) -> None:
    """Copy what a cache holds now: to keep, to share, or to read without growcache."""
    from growcache.cli.export import export_cache

    _print(export_cache(cache, out, samples=samples, cache_format=format_, shared=shared))


@app.command(epilog=examples_epilog("purge"))
def purge(
    cache: CacheArgument,
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY]...", help="Keys of objects, as peek shows them, or URLs."
        ),
    ] = None,
    keys_from: Annotated[
        str | None,
        typer.Option(
            "--keys-from",
            metavar="FILE",
            help="A key a line, or the purge list of another cache; - for the standard input.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until no reader holds a sample of them any more.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove every sample of some objects from a cache, for good.

    The objects are never drawn again, wherever the cache's list of them is. A service may
    run. Without keys an earlier purge is finished. Exit code 1 where some are left, or may be.
    """
    from growcache.cli.purge import purge_objects

    raise typer.Exit(purge_objects(cache, keys or [], keys_from, wait=wait, json=json))


@app.command(epilog=examples_epilog("release"))
def release(
    cache: CacheArgument,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only what readers of this job protect.")
    ] = None,
) -> None:
    """Let go of what dead readers still protect, because they will not come back.

    A trainer that was killed keeps shards for as long as cache.resume_seconds, if it
    ever gave a state_dict(). Readers that live keep theirs. Exit code 1 where a dead
    reader's lease may not be changed by this user.
    """
    from growcache.cli.clear import release_readers

    text, code = release_readers(cache, job)
    _print(text)
    raise typer.Exit(code)


@app.command(epilog=examples_epilog("clear"))
def clear(
    cache: CacheArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete every sample of a cache that no service and no reader uses."""
    from growcache.cli.clear import clear_question, empty_cache

    if not yes:
        typer.confirm(fold_to_width(clear_question(cache), sys.stdout), abort=True)
    _print(empty_cache(cache))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code: 0 success, 1 a finding, 2 bad usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows a ? instead
            stream.reconfigure(errors="replace")
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        code = app(apply_no_color(given), prog_name="growcache", standalone_mode=False)
    except UsageError as error:
        return _print_error(f"{_usage_sentence(error)} See: {_command_path(error)} --help", 2)
    except GrowcacheError as error:
        return _print_error(str(error), error.exit_code)
    except typer.Abort:
        return _print_error("nothing was changed", 1)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    return code if isinstance(code, int) else 0


def _print(text: str) -> None:
    typer.echo(fold_to_width(text, sys.stdout))


def _usage_sentence(error: Any) -> str:
    message = error.format_message().rstrip(".")
    message = re.sub(r" \(Possible options: ([^,)]+)[^)]*\)", r". Did you mean \1?", message)
    return message if message.endswith("?") else f"{message}."


def _command_path(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "growcache"


def _print_error(message: str, code: int) -> int:
    from growcache.usercode import printable

    lines = [printable(line) for line in message.splitlines() if line.strip()][:2]
    typer.echo(fold_to_width("growcache: " + "\n".join(lines), sys.stderr), err=True)
    return code
