"""``growcache check``: read every byte of a cache, say what is wrong with it, and mend it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from growcache.cache.check import check
from growcache.cache.findings import Finding
from growcache.cache.repair import repair
from growcache.service.listing import check_listing, mend_listing
from growcache.service.terminal import redraws
from growcache.service.words import plural
from growcache.usercode import printable

STYLES = {"error": "bold red", "mended": "green", "info": "dim"}


def show_check(cache: Path, *, json: bool, mend: bool = False) -> int:
    """Print the findings; return the exit code: 1 where one of them is an error (still).

    Args:
        cache: its folder.
        json: as one object.
        mend: repair what can be.

    Raises:
        CacheMissingError: there is no cache.
        CacheBusyError: a service fills what is to be mended.
    """
    findings, shards = _with_progress(cache, repair if mend else check)
    findings += mend_listing(cache) if mend else check_listing(cache)
    errors = [finding for finding in findings if finding.severity == "error"]
    if json:
        value = {"ok": not errors, "shards": shards, "findings": [asdict(f) for f in findings]}
        sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
        sys.stdout.buffer.flush()
    else:
        _print(findings, shards)
        _say_what_next(cache, findings)
    return 1 if errors else 0


def _with_progress(
    cache: Path, work: Callable[..., list[Finding]]
) -> tuple[list[Finding], int]:
    checked = 0
    # On the error stream, so that the output stays clean where it is read by a program.
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not redraws(sys.stderr)) as progress:
        task = progress.add_task("checking shards", total=None)

        def advance(done: int, total: int) -> None:
            nonlocal checked
            checked = done
            progress.update(task, completed=done, total=total)

        return work(cache, on_shard=advance), checked


def _print(findings: Sequence[Finding], shards: int) -> None:
    console = Console()
    if console.is_terminal:
        console.print(_grid(findings))
    else:  # a line each, for grep
        for finding in findings:
            sys.stdout.write(f"{finding.severity}  {_words(finding)}\n")
        sys.stdout.flush()
    console.print(_verdict(findings, shards), style="bold")


def _verdict(findings: Sequence[Finding], shards: int) -> str:
    of = {name: sum(f.severity == name for f in findings) for name in ("error", "mended")}
    counts = [plural(of["error"], "error")] if of["error"] else []
    counts += [f"{plural(of['mended'], 'error')} mended"] if of["mended"] else []
    begin = f"{', '.join(counts)} in" if counts else "all is well with"
    return f"{begin} {plural(shards, 'shard')}"


def _say_what_next(cache: Path, findings: Sequence[Finding]) -> None:
    drawn = {f.shard for f in findings if f.severity == "mended" and f.shard is not None}
    if any(f.severity == "error" and f.mendable for f in findings):
        sys.stdout.write(f"to mend: growcache check {printable(str(cache))} --repair\n")
    if drawn:
        again = plural(len(drawn), "shard")
        sys.stdout.write(f"set aside: {again}; the next growcache run draws them again\n")


def _grid(findings: Sequence[Finding]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        style = STYLES[finding.severity]
        grid.add_row(Text(finding.severity, style), Text(_words(finding)))
    return grid


def _words(finding: Finding) -> str:
    where = "" if finding.shard is None else f"shard {finding.shard}: "
    return printable(f"{where}{finding.message}")
