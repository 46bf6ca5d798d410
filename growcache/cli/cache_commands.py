"""The commands that take a cache: their options and the texts of `--help`.

Each imports its modules when it runs, so that ``--help`` and Tab are quick.
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
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
) -> None:
    """Show how full a cache is, what its service is doing, and its readers."""
    from growcache.cache.status import read_status

    # A missing cache is an error at once, rather than an empty picture.
    found = read_status(cache)
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
            metavar="CACHE...", help="The caches' folders.", autocompletion=complete_cache
        ),
    ] = None,
    http: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The address to listen on.")
    ] = "127.0.0.1:8650",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="File with the token, instead of GROWCACHE_TOKEN.",
        ),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="Path under which a proxy serves it, such as /growcache."
        ),
    ] = "/",
    grafana: Annotated[
        bool, typer.Option("--grafana", help="Print a Grafana dashboard instead.")
    ] = False,
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print Prometheus alert rules instead.")
    ] = False,
    listen_fd: Annotated[int | None, typer.Option("--listen-fd", hidden=True)] = None,
) -> None:
    """Show caches in a browser, and serve their metrics to Prometheus, until Ctrl-C.

    It only reads, and needs no running service. By default it listens on the
    loopback address; use ssh -L from another machine. Any other address needs a
    token, which each request must carry.
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
        typer.Option(
            "--repair", help="Repair it. Stop the service first. Exit code 0: all is repaired."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Verify every file, row and checksum of a cache. Exit code 1 if anything is wrong.

    --repair rebuilds the index from the shards and sets damaged shards aside,
    so that the next run draws them again.
    """
    from growcache.cli.check import show_check

    raise typer.Exit(show_check(cache, json=json, mend=mend))


def peek(
    cache: CacheArgument,
    sample: Annotated[
        str | None, typer.Option(metavar="SHARD:I", help="Show only this sample.")
    ] = None,
    refetch: Annotated[
        bool,
        typer.Option(
            "--refetch", help="Fetch it again and compare. Exit code 1 if it differs."
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="The cache's config, if the store needs more than a URL, or samples need your code.",
            autocompletion=complete_config,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show samples of a cache, and the object that each came from."""
    if config is not None and not refetch:
        raise ConfigError(
            "--config is only for --refetch; add --refetch, or leave --config out", code="GC105"
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
            help="The loader's journal (its argument journal=).",
            autocompletion=complete_path,
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="The batch, counted over all epochs from 0."),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank whose batch it is.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write the batch's arrays, as .npz."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Keep redrawn shards in this folder for the next call."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="Ask the store whether the objects have changed.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Rebuild a batch that a loader with a journal delivered, and name its samples.

    The batch is the same bit for bit, on this machine or another. Samples that
    are no longer cached are drawn again from the store. The loader's transform
    is not applied; growcache.replay in Python applies it. Exit code 1 if
    objects have changed.
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
        typer.Option(metavar="DIR", help="Also write the charts as SVG files, for papers."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare with the output of plan --json.",
            autocompletion=complete_path,
        ),
    ] = None,
) -> None:
    """Write a cache's history into one HTML file: charts, limits, coverage, cost.

    The file works offline, and has a paragraph for a paper. The cache is not
    changed.
    """
    from growcache.cli.report import write_report

    _print(write_report(cache, out, svg, plan))


def export(
    cache: CacheArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Copy only the newest shards with this number of samples."),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="tfrecord or npy. Default: the cache's own format.",
        ),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Let others read the copy, as your umask allows.")
    ] = False,
) -> None:
    """Copy the current samples of a cache, to keep, to share, or to read without growcache."""
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
            help="File with a key per line, or another cache's purge list. - reads the standard input.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until no reader holds their samples.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Remove every sample of some objects from a cache, for good.

    The objects are recorded in the cache's purge list, and are never drawn
    again. The service may keep running. Without keys, an earlier purge is
    finished. Exit code 1 if samples are left, or may be.
    """
    from growcache.cli.purge import purge_objects

    raise typer.Exit(purge_objects(cache, keys or [], keys_from, wait=wait, json=json))


def release(
    cache: CacheArgument,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the readers of this job.")
    ] = None,
) -> None:
    """Release the shards of dead readers that will not resume.

    After a trainer is killed, its shards stay protected for
    cache.resume_seconds, if it ever called state_dict(). Live readers keep
    theirs. Exit code 1 if this user may not change a dead reader's lease.
    """
    from growcache.cli.clear import release_readers

    text, code = release_readers(cache, job)
    _print(text)
    raise typer.Exit(code)


def clear(
    cache: CacheArgument,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")
    ] = False,
) -> None:
    """Delete every sample of a cache. No service or reader may be using it."""
    from growcache.cli.clear import clear_question, empty_cache

    if not yes:
        typer.confirm(fold_to_width(clear_question(cache), sys.stdout), abort=True)
    _print(empty_cache(cache))


def _print(text: str) -> None:
    typer.echo(fold_to_width(text, sys.stdout))
