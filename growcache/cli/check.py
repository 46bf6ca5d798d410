"""``growcache check``: read every byte of a cache, report damage, and repair it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from growcache.cache.check import Finding, check, repair
from growcache.cache.files import CacheLayout, generation_paths
from growcache.cache.locks import FileLock, is_locked
from growcache.cli.terminal import print_json, progress_bar
from growcache.errors import CacheError
from growcache.humanize import plural
from growcache.store.catalog import Catalog
from growcache.usercode import printable

SEVERITY_STYLES = {"error": "bold red", "mended": "green", "info": "dim"}


def show_check(cache: Path, *, json: bool, mend: bool = False) -> int:
    """Print the findings. Return exit code 1 if one of them is (still) an error."""
    shards = 0
    with progress_bar("checking shards") as advance:

        def show(done: int, total: int) -> None:
            nonlocal shards
            shards = done
            advance(completed=done, total=total)

        findings = []
        for path in generation_paths(cache.absolute()):
            findings += (repair if mend else check)(path, on_shard=show)
            findings += repair_catalog(path) if mend else check_catalog(path)
    errors = [finding for finding in findings if finding.severity == "error"]
    if json:
        value = {"ok": not errors, "shards": shards, "findings": [asdict(f) for f in findings]}
        print_json(orjson.dumps(value))
    else:
        _print_findings(findings, shards)
        _print_next_steps(cache, findings)
    return 1 if errors else 0


def _print_findings(findings: Sequence[Finding], shards: int) -> None:
    console = Console()
    if console.is_terminal:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for finding in findings:
            style = SEVERITY_STYLES[finding.severity]
            grid.add_row(Text(finding.severity, style), Text(_finding_text(finding)))
        console.print(grid)
    else:  # one per line, for grep
        for finding in findings:
            sys.stdout.write(f"{finding.severity}  {_finding_text(finding)}\n")
        sys.stdout.flush()
    console.print(_verdict_text(findings, shards), style="bold")


def _verdict_text(findings: Sequence[Finding], shards: int) -> str:
    of = {name: sum(f.severity == name for f in findings) for name in ("error", "mended")}
    counts = [plural(of["error"], "error")] if of["error"] else []
    counts += [f"{plural(of['mended'], 'error')} mended"] if of["mended"] else []
    begin = f"{', '.join(counts)} in" if counts else "all is well with"
    return f"{begin} {plural(shards, 'shard')}"


def _print_next_steps(cache: Path, findings: Sequence[Finding]) -> None:
    drawn = {f.shard for f in findings if f.severity == "mended" and f.shard is not None}
    if any(f.severity == "error" and f.mendable for f in findings):
        sys.stdout.write(f"to repair: growcache check {printable(str(cache))} --repair\n")
    if drawn:
        again = plural(len(drawn), "shard")
        sys.stdout.write(f"set aside: {again}; the next growcache run draws them again\n")


def _finding_text(finding: Finding) -> str:
    where = "" if finding.shard is None else f"shard {finding.shard}: "
    return printable(f"{where}{finding.message}")


def check_catalog(cache: Path) -> Iterator[Finding]:
    path = CacheLayout(cache).catalog
    if not path.exists() or not path.stat().st_size:
        return  # the next start lists the source
    try:
        with Catalog.open(path, readonly=True) as catalog:
            torn, count = catalog.torn_bytes, len(catalog)
    except CacheError:
        yield Finding("error", None, f"{path} is damaged from its start", mendable=True)
        return
    if torn and not is_locked(CacheLayout(cache).supervisor_lock):
        text = f"{path}: {torn} bytes after the first {count} objects are damaged; the next start lists again"
        yield Finding("info", None, text)


def repair_catalog(cache: Path) -> list[Finding]:
    """Remove an unreadable copy of the listing, because the next start lists the source again."""
    layout = CacheLayout(cache)
    with FileLock.acquire(layout.supervisor_lock):
        found = list(check_catalog(cache))
        if any(finding.mendable for finding in found):
            layout.catalog.unlink()
    return [
        replace(
            finding, severity="mended", message=f"{finding.message}; the next start lists again"
        )
        if finding.mendable
        else finding
        for finding in found
    ]
