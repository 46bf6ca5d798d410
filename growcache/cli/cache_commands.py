"""The commands that take a cache: their options, and what `--help` says.

Each imports what it needs, so that ``--help`` and Tab are quick.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from growcache.cli.arguments import CacheArgument, ConfigArgument, JsonOption
from growcache.cli.completion import complete_cache, complete_config, complete_path
from growcache.cli.terminal import fold_to_width, print_json, signals_as_ctrl_c
from growcache.errors import ConfigError

REFRESH_SECONDS = 0.5


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
    from growcache.cli.reporter_choice import choose_reporter
    from growcache.cli.status import json_lines

    with (
        suppress(KeyboardInterrupt),
        signals_as_ctrl_c(),
        json_lines() if json else choose_reporter() as shown,
    ):
        while True:
            shown.show(read_status(cache))
            time.sleep(REFRESH_SECONDS)


def dashboard(
    caches: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CACHE...", help="Folders of caches.", autocompletion=complete_cache
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
        raise ConfigError(
            "name the folder of a cache: growcache dashboard ./cache", code="GC105"
        )
    show_dashboard(caches, http, token_file=token_file, prefix=prefix, listen_fd=listen_fd)


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
            autocompletion=complete_config,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what the samples of a cache look like, and which object each came from."""
    if config is not None and not refetch:
        raise ConfigError(
            "--config is for --refetch; a look at the cache needs none", code="GC105"
        )
    if not refetch:
        from growcache.cli.peek import peek_cache

        peek_cache(cache, sample, json=json)
        return
    if sample is None:
        raise ConfigError("--refetch needs --sample SHARD:I, such as 12:0", code="GC105")
    from growcache.cli.redraw_sample import refetch_sample

    raise typer.Exit(refetch_sample(cache, sample, config, json=json))


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


def clear(
    cache: CacheArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete every sample of a cache that no service and no reader uses."""
    from growcache.cli.clear import clear_question, empty_cache

    if not yes:
        typer.confirm(fold_to_width(clear_question(cache), sys.stdout), abort=True)
    _print(empty_cache(cache))


def _print(text: str) -> None:
    typer.echo(fold_to_width(text, sys.stdout))
