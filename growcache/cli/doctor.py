"""``growcache doctor``: measure the resources of a service, and print faults and limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from growcache.cli.plan import number_of
from growcache.cli.terminal import can_redraw, print_json
from growcache.config_text import load_config
from growcache.monitor.doctor import Finding, find_all
from growcache.monitor.doctor_facts import DoctorFacts
from growcache.monitor.doctor_limits import Limit, find_limit
from growcache.monitor.doctor_measure import measure
from growcache.secrecy import hide_secrets
from growcache.usercode import printable

LEVEL_STYLES = {"ok": "green", "warn": "bold yellow", "wrong": "bold red"}
LEVEL_SIGNS = {"ok": "ok", "warn": "warn", "wrong": "WRONG"}


def show_doctor(
    config: Path, overrides: Sequence[str], consume: str | None, *, json: bool
) -> int:
    """Print the findings. Return exit code 1 if something is wrong."""
    settings = load_config(config, overrides, os.environ)
    rate = None if consume is None else number_of("--consume", consume)
    with ExitStack() as stack:
        step = _steps(stack)
        facts = measure(settings, rate, on_step=step)
    findings, limit = find_all(facts), find_limit(facts)
    wrong = any(finding.level == "wrong" for finding in findings)
    if json:
        print_json(_as_json(facts, findings, limit, ok=not wrong))
    else:
        _print(findings, limit)
    return 1 if wrong else 0


def _steps(stack: ExitStack) -> Callable[[str], None]:
    if not can_redraw(sys.stderr):
        return lambda _: None
    status = stack.enter_context(Console(stderr=True).status("measuring …"))
    return lambda text: status.update(Text(f"{printable(hide_secrets(text))} …"))


def _as_json(
    facts: DoctorFacts, findings: Sequence[Finding], limit: Limit, *, ok: bool
) -> bytes:
    value = {
        "ok": ok,
        "findings": [asdict(finding) for finding in findings],
        "limit": asdict(limit),
        "measured": asdict(facts),
    }
    return orjson.dumps(value)


def _print(findings: Sequence[Finding], limit: Limit) -> None:
    console = Console()
    if console.is_terminal:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for one in findings:
            level = Text(LEVEL_SIGNS[one.level], LEVEL_STYLES[one.level])
            grid.add_row(level, Text(one.about, "bold"), Text("\n".join(_lines(one))))
        grid.add_row(
            Text("limit", "bold cyan"), Text(limit.resource, "bold"), _limit_text(limit)
        )
        console.print(grid)
    else:  # one per line, for grep
        for one in findings:
            sys.stdout.write(f"{one.level}  {one.about}: {'; '.join(_lines(one))}\n")
        sys.stdout.write(f"limit  {limit.resource}: {'; '.join(_limit_lines(limit))}\n")
        sys.stdout.flush()
    console.print(_verdict(findings, limit), style="bold")


def _lines(finding: Finding) -> list[str]:
    lines = [finding.found]
    if finding.expected and finding.level != "ok":
        lines.append(f"expected: {finding.expected}")
    if finding.advice:
        lines.append(f"to do: {finding.advice}")
    return [printable(line) for line in lines]


def _limit_lines(limit: Limit) -> list[str]:
    return [limit.text, *([f"to do: {limit.advice}"] if limit.advice else [])]


def _limit_text(limit: Limit) -> Text:
    return Text("\n".join(printable(line) for line in _limit_lines(limit)))


def _verdict(findings: Sequence[Finding], limit: Limit) -> str:
    counts = {level: sum(one.level == level for one in findings) for level in LEVEL_STYLES}
    if counts["wrong"]:
        more = f", {counts['warn']} to look at" if counts["warn"] else ""
        return f"{counts['wrong']} wrong{more}"
    if counts["warn"]:
        return f"nothing is wrong, {counts['warn']} to look at"
    return (
        "all is well" if not limit.advice else f"nothing is wrong; limited by: {limit.resource}"
    )
