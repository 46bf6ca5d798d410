"""``growcache plan``: measure source and disk, simulate, and show the figures with their bases."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from growcache.cli.terminal import print_json, spinner
from growcache.config import Config
from growcache.config_text import load_config
from growcache.errors import ConfigError
from growcache.humanize import in_bytes, in_count, in_percent, in_time
from growcache.launcher import with_launched_node
from growcache.monitor.plan import plan
from growcache.monitor.plan_figures import (
    Figure,
    Outcome,
    PlanInputs,
    Warned,
    plan_values,
)
from growcache.monitor.plan_inputs import Given, inputs_of, look_at_machine
from growcache.monitor.plan_source import Look, look_at_source
from growcache.monitor.plan_warnings import warnings_of
from growcache.monitor.prices import find_price

MOST_COLUMNS = 4  # of a sweep in one table
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the setting by which it differs from others of a sweep."""

    name: str
    inputs: PlanInputs
    outcome: Outcome
    warned: list[Warned]


def seconds_of(text: str) -> float:
    """Return a duration in seconds. May raise ConfigError.

    >>> seconds_of("90"), seconds_of("15 min"), seconds_of("1h"), seconds_of("2d")
    (90.0, 900.0, 3600.0, 172800.0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d)?", text.strip())
    seconds = float(found[1]) * _UNITS[found[2] or ""] if found else 0.0
    if not seconds:
        raise ConfigError(
            f"--horizon: expected a duration such as 90, 15min or 1h, found {text!r}",
            code="GC105",
        )
    return seconds


def size_of(option: str, text: str) -> float:
    """Return bytes. A rate may end with /s.

    >>> size_of("--link", "25MB/s"), size_of("--link", "1000000")
    (25000000.0, 1000000.0)
    """
    try:
        size = TypeAdapter(ByteSize).validate_python(text.removesuffix("/s"))
    except ValidationError:
        size = ByteSize(0)
    if size <= 0:
        raise ConfigError(
            f"{option}: expected bytes such as 25MB, found {text!r}", code="GC105"
        )
    return float(size)


def number_of(option: str, text: str) -> float:
    """Return a number above 0. A rate may end with /s.

    >>> number_of("--consume", "400/s")
    400.0
    """
    try:
        number = float(text.removesuffix("/s"))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(
            f"{option}: expected samples per second such as 400, found {text!r}", code="GC105"
        )
    return number


def show_plan(
    config: Path, overrides: Sequence[str], given: Given, sweep: str | None, *, json: bool
) -> None:
    plans = _plans(config, overrides, given, sweep)
    values = [plan_values(one.inputs, one.outcome, one.warned) for one in plans]
    if json and sweep is None:
        print_json(orjson.dumps(values[0]))
    elif json:
        named = [{"set": one.name, **value} for one, value in zip(plans, values, strict=True)]
        print_json(orjson.dumps(named))
    else:
        Console().print(*pictures(plans), sep="\n")


def pictures(plans: Sequence[Planned]) -> Iterator[RenderableType]:
    for start in range(0, len(plans), MOST_COLUMNS):
        yield _outcomes(plans[start : start + MOST_COLUMNS])
    yield _inputs(plans[0].inputs)
    yield from _warning_lines(plans)


# ------------------------------------------------------------------------ plans


def _plans(
    file: Path, overrides: Sequence[str], given: Given, sweep: str | None
) -> list[Planned]:
    variants = swept(sweep) if sweep is not None else [""]
    configs = [
        with_launched_node(load_config(file, [*overrides, *([one] if one else [])], os.environ))
        for one in variants
    ]
    if given.price is not None:
        find_price(given.price)  # refuses an unknown price before anything is read
    with spinner(sys.stderr, "reading a few samples of the source …"):
        look = look_at_source(configs[0])
        machine = look_at_machine(configs[0], given)
        looks = [_look(config, configs[0], look) for config in configs]
    found = []
    for name, config, seen in zip(variants, configs, looks, strict=True):
        inputs = inputs_of(config, seen, machine, given)
        outcome = plan(inputs)
        found.append(Planned(name, inputs, outcome, warnings_of(inputs, outcome)))
    return found


def _look(config: Config, first: Config, look: Look) -> Look:
    """Return a look for a configuration of a sweep: a new one only for other sources or visits."""
    if (config.source, config.split, config.sampling) != (
        first.source,
        first.split,
        first.sampling,
    ):
        return look_at_source(config)
    return look.with_bound(config) or look_at_source(config)


def swept(text: str) -> list[str]:
    """Return the settings named by ``KEY=A,B,C``.

    >>> swept("cache.max_bytes=50GB,100GB")
    ['cache.max_bytes=50GB', 'cache.max_bytes=100GB']
    """
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not all(values.split(",")):
        raise ConfigError(f"--sweep: expected KEY=A,B,C, found {text!r}", code="GC105")
    return [f"{key.strip()}={value.strip()}" for value in values.split(",")]


# ------------------------------------------------------------------------ tables


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else in_time(value)


def _count(value: float) -> str:
    return f"{value:.3g}" if value < 100 else in_count(value)


def _dollars(value: float) -> str:
    return f"${value:,.2f}"


def _times(value: float) -> str:
    return f"{value:.2f}"


def _rate(value: float) -> str:
    return f"{in_bytes(value)}/s"


Words = Callable[[float], str]
OUTCOME_ROWS: Mapping[str, tuple[str, Words]] = {
    "first_batch_seconds": ("first batch after", _seconds),
    "full_seconds": ("cache full after", _seconds),
    "complete_seconds": ("all of it cached after", _seconds),
    "turnover_seconds": ("turned over in", _seconds),
    "samples": ("cached samples", in_count),
    "coverage": ("coverage", in_percent),
    "reuse": ("reuse", _times),
    "reuse_when_full": ("reuse, once full", _times),
    "ess_samples": ("effective samples", in_count),
    "exposed_wait_share": ("exposed wait", in_percent),
    "samples_per_second": ("drawn samples/s", _count),
    "requests_per_second": ("requests/s", _count),
    "egress_bytes_per_hour": ("egress per hour", in_bytes),
    "read_amplification": ("bytes read ÷ cached", _times),
    "cost_usd_per_day": ("cost of the first day", _dollars),
    "bound_bytes": ("bound that the disk allows", in_bytes),
}
AT_HORIZON = ("samples", "coverage", "reuse", "ess_samples")
TIMES = ("first_batch_seconds", "full_seconds", "complete_seconds")  # None: never
OPTIONAL = ("complete_seconds", "reuse_when_full")  # shown only if they are known
INPUT_ROWS: Mapping[str, tuple[str, Words]] = {
    "consumption": ("consumption, samples/s", _count),
    "link_bytes_per_second": ("link", _rate),
    "visit_seconds": ("one visit alone", lambda value: f"{1000 * value:.1f} ms"),
    "visit_bytes": ("bytes of a visit", in_bytes),
    "visit_requests": ("requests of a visit", _times),
    "visit_samples": ("samples of a visit", _count),
    "sample_bytes": ("bytes of a sample", in_bytes),
    "population_samples": ("population, samples", in_count),
    "cpu_seconds": ("processor per visit", lambda value: f"{1000 * value:.2f} ms"),
    "disk_bytes_per_second": ("disk writes", _rate),
    "startup_seconds": ("start until the first read", _seconds),
    "min_samples": ("min_samples", in_count),
}
BASIS_STYLES = {"measured": "green", "given": "cyan", "assumed": "yellow"}


def _shown(figure: Figure, words: Words, unknown: str = "unknown") -> str:
    if figure.value is None:
        if figure.low is not None and figure.high is not None:
            return f"{words(figure.low)} to {words(figure.high)}"
        return unknown
    if figure.value == float("inf"):
        return "no limit found"
    return words(figure.value)


def _range(figure: Figure, words: Words) -> str:
    low, high = figure.low, figure.high
    if figure.value is None or low is None or high is None or high == float("inf"):
        return ""
    texts = words(low), words(high)
    return "" if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _basis(figure: Figure) -> Text:
    if figure.value is None and figure.low is None:
        return Text("")
    return Text(figure.basis, BASIS_STYLES[figure.basis])


def _outcomes(plans: Sequence[Planned]) -> Table:
    horizon = re.sub(" 0 (min|s)$", "", in_time(plans[0].inputs.horizon_seconds))
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="bold")
    table.title = f"Plan of {plans[0].inputs.config.cache.path}"
    table.add_column("", style="bold", no_wrap=True)
    if len(plans) > 1 or plans[0].name:
        table.title += f", by {plans[0].name.partition('=')[0]}"
        for one in plans:
            table.add_column(one.name.partition("=")[2], justify="right")
    else:
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("range", style="dim", no_wrap=True)
        table.add_column("basis")
    for name, (label, words) in OUTCOME_ROWS.items():
        figures = [one.outcome[name] for one in plans]
        if name in OPTIONAL and all(figure.value is None for figure in figures):
            continue
        label += f" after {horizon}" if name in AT_HORIZON else ""
        unknown = "never" if name in TIMES else "unknown"
        values = [_shown(figure, words, unknown) for figure in figures]
        if len(table.columns) == len(plans) + 1:
            table.add_row(label, *values)
        else:
            table.add_row(label, values[0], _range(figures[0], words), _basis(figures[0]))
    return table


def _inputs(inputs: PlanInputs) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="bold")
    table.title = "\nIt rests on"
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_column()
    table.show_header = False
    for name, (label, words) in INPUT_ROWS.items():
        figure = inputs.figures[name]
        shown = _shown(figure, words)
        if name == "consumption" and figure.value is None:
            shown = "not given"
        if name == "population_samples" and figure.value and not inputs.is_listed:
            shown = f"{shown} or more"
        basis = Text("") if figure.value is None else _basis(figure)
        table.add_row(Text(label, "bold"), shown, Text(_range(figure, words), "dim"), basis)
    limit = Text(f"the {inputs.limited_by}")
    table.add_row(Text("samplers are limited by", "bold"), limit, "", "")
    price = inputs.price
    if price is None:
        table.add_row(Text("price", "bold"), "none known; give --price", "", "")
    else:
        table.add_row(
            Text("price", "bold"),
            f"{price.provider} {price.name}",
            Text(price.standing, "dim"),
            Text(inputs.price_basis, BASIS_STYLES[inputs.price_basis]),
        )
    return table


def _warning_lines(plans: Sequence[Planned]) -> list[Text]:
    """Return each warning once, with the settings of a sweep that cause it."""
    by_code: dict[str, list[tuple[str, Warned]]] = {}
    for one in plans:
        for warned in one.warned:
            by_code.setdefault(warned.code, []).append((one.name.partition("=")[2], warned))
    lines: list[Text] = []
    for found in by_code.values():
        name, warned = found[0]
        of = ", ".join(name for name, _ in found) if name and len(found) < len(plans) else ""
        line = Text("\n! ", "bold yellow")
        line.append(f"{of}: " if of else "", "bold")
        line.append(f"{warned.text}.\n", "default")
        line.append(f"  → {warned.remedy}.", "dim")
        lines.append(line)
    return lines
