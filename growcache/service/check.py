"""``growcache check``: read every byte of a cache, and say what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from growcache.cache.check import Finding, check
from growcache.service.terminal import redraws
from growcache.service.words import plural
from growcache.usercode import printable


def show_check(cache: Path, *, json: bool) -> int:
    """Print the findings; return the exit code: 1 where one of them is an error.

    Raises:
        CacheMissingError: there is no cache.
    """
    findings, shards = _with_progress(cache)
    errors = [finding for finding in findings if finding.severity == "error"]
    if json:
        value = {"ok": not errors, "shards": shards, "findings": [asdict(f) for f in findings]}
        sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
        sys.stdout.buffer.flush()
    else:
        _print(findings, errors, shards)
    return 1 if errors else 0


def _with_progress(cache: Path) -> tuple[list[Finding], int]:
    checked = 0
    # On the error stream, so that the output stays clean where it is read by a program.
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not redraws(sys.stderr)) as progress:
        task = progress.add_task("checking shards", total=None)

        def advance(done: int, total: int) -> None:
            nonlocal checked
            checked = done
            progress.update(task, completed=done, total=total)

        return check(cache, on_shard=advance), checked


def _print(findings: Sequence[Finding], errors: Sequence[Finding], shards: int) -> None:
    console = Console()
    if console.is_terminal:
        console.print(_grid(findings))
    else:  # a line each, for grep
        for finding in findings:
            sys.stdout.write(f"{finding.severity}  {_words(finding)}\n")
        sys.stdout.flush()
    verdict = f"{plural(len(errors), 'error')} in " if errors else "all is well with "
    console.print(f"{verdict}{plural(shards, 'shard')}", style="bold")


def _grid(findings: Sequence[Finding]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "dim"
        grid.add_row(Text(finding.severity, style), Text(_words(finding)))
    return grid


def _words(finding: Finding) -> str:
    where = "" if finding.shard is None else f"shard {finding.shard}: "
    return printable(f"{where}{finding.message}")
