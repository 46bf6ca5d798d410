"""``growcache check``: read every byte of a cache, and say what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import Progress

from growcache.cache.check import Finding, check
from growcache.service.terminal import redraws
from growcache.service.words import plural


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
    for finding in findings:
        style = "bold red" if finding.severity == "error" else "dim"
        where = "" if finding.shard is None else f"shard {finding.shard}: "
        console.print(finding.severity, style=style, end="  ")
        console.print(f"{where}{finding.message}", markup=False, highlight=False)
    verdict = f"{plural(len(errors), 'error')} in " if errors else "all is well with "
    console.print(f"{verdict}{plural(shards, 'shard')}", style="bold")
