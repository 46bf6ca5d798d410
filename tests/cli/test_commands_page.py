"""docs/reference/commands.md: the outputs in it are what the commands put out, the keys what JSON has.

One small service runs; all else is asked of the cache that it leaves.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer.main
from rich.console import Group

from benchmarks.picture import as_svg
from growcache.cache.history import read_history
from growcache.cache.index.reader import read_index
from growcache.cache.metrics_file import read_metrics
from growcache.cache.reader_lease import Lease
from growcache.cache.status_model import (
    ForeignLeaseStatus,
    JobStatus,
    LeaseStatus,
    SourceStatus,
    Status,
    StratumStatus,
    WaitsStatus,
    WorkerStatus,
)
from growcache.cli.cli import app, main
from growcache.cli.plan import Planned, pictures
from growcache.cli.status import StatusHistory
from growcache.cli.view import StatusPicture
from growcache.monitor.plan import plan
from growcache.monitor.plan_figures import plan_values
from growcache.monitor.plan_warnings import warnings_of
from growcache.numpy import EpochLoader
from growcache.store.counts import number_in
from tests.cli.terminals import COMMAND
from tests.cli.test_view import drawn
from tests.monitor.planning import plan_inputs
from tests.tables import DOCS

PAGE = DOCS / "reference/commands.md"
END = "<!-- end -->"
HOME = "/home/me"
READ_TIME = (
    "A read took less than 2 ms, so the CPU sets the rate: more workers help, more reads in "
    "flight do not."
)
COMMANDS: Any = typer.main.get_command(app)
KINDS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "true or false": lambda value: isinstance(value, bool),
    "true, false or null": lambda value: value is None or isinstance(value, bool),
    "list": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder with a cache that a service has filled, and the lines that it wrote."""
    here = tmp_path_factory.mktemp("page")
    (here / "data").mkdir()
    for i in range(6):
        rows = np.random.default_rng(i).normal(size=(64, 8)).astype("<f4")
        np.save(here / "data" / f"subject-{i}.npy", rows)
    (here / "my_labels.py").write_text(
        "def label(sample, origin):\n"
        "    name = origin.key.rpartition('/')[2]\n"
        "    return {**sample, 'y': int(name[8]), 'note': name[:9]}\n"
    )
    (here / "growcache.yaml").write_text(
        "source: {url: 'data/*.npy', options: {window: 16}}\n"
        "sampling: {transform: 'my_labels:label', shard_samples: 8}\n"
        "cache: {path: cache, max_bytes: 60MB}\n"
        "split: {fractions: {all: 1}, use: all}\n"
    )
    done = subprocess.run(
        [*COMMAND, "run", "growcache.yaml", "--until-full"],
        cwd=here,
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert done.stderr == b""
    return here, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def here(lines: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lines[0])
    monkeypatch.setenv("COLUMNS", "80")
    return lines[0]


def section(name: str) -> str:
    """The text below a heading."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(f"\n## growcache {name}\n")[2].partition("\n## ")[0]


def keys(text: str) -> list[dict[str, str]]:
    """Per table of keys: what each is."""
    tables = re.findall(r"\| key \| is \| means \|\n\| [- |]+\n((?:\|.*\n)+)", text)
    rows = [[line.split(" | ") for line in table.splitlines()] for table in tables]
    assert all(len(row) == 3 and len(row[2]) > 4 for table in rows for row in table)
    return [{row[0].removeprefix("| "): row[1] for row in table} for table in rows]


def found_in(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a value and what is there, as the page names keys."""
    for key, inner in value.items():
        name = f"{prefix}{'FIELD' if prefix.endswith('.arrays.') else key}"
        if not prefix.endswith(".arrays."):
            yield name, inner
        if isinstance(inner, dict):
            yield from found_in(inner, f"{name}.")
        elif isinstance(inner, list):
            for item in inner:
                if isinstance(item, dict):
                    yield from found_in(item, f"{name}[].")


def hold(documented: dict[str, str], value: Any) -> set[str]:
    """Assert that a value has only documented keys, each of its kind; return those it has."""
    for key, inner in found_in(value):
        assert key in documented, f"{key} is not in docs/reference/commands.md"
        kinds = documented[key] if documented[key] in KINDS else documented[key].split(" or ")
        allowed = [kinds] if isinstance(kinds, str) else kinds
        assert any(KINDS[kind](inner) for kind in allowed), (key, inner, documented[key])
    return {key for key, _ in found_in(value)}


def shown(name: str, text: str, *, writes: bool) -> None:
    """Compare an output with what the page says, or write it there."""
    page = PAGE.read_text(encoding="utf-8")
    head, begin, rest = page.partition(f"<!-- shown: {name} -->\n")
    written, end, tail = rest.partition(END)
    assert begin, f"docs/reference/commands.md has no place for {name}"
    block = "```text\n" + "\n".join(line.rstrip() for line in text.splitlines()) + "\n```\n"
    if writes:
        PAGE.write_text(head + begin + block + end + tail, encoding="utf-8")
    else:
        assert written == block, "write it anew with: pytest --write-tables"


def output(command: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    capsys.readouterr()
    assert main(command.split()[1:]) == code
    return f"$ {command}\n{capsys.readouterr().out}"


def as_json(command: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    return json.loads(output(command, capsys, code).partition("\n")[2])


def test_the_run_left_its_metrics_and_its_history(here: Path) -> None:
    metrics, totals = read_metrics(here / "cache"), read_index(here / "cache").totals
    assert metrics is not None
    assert number_in(metrics.counts, "drawn") == totals.drawn == 24
    assert number_in(metrics.counts, "requests", "get", "ok") >= 6
    stages = metrics.counts["group_seconds"]
    assert isinstance(stages, dict)
    assert {"fetch", "transform", "encode", "reserve", "write"} == stages.keys()
    last = read_history(here / "cache")[-1]
    assert (last.state, last.drawn, last.errors) == ("stopped", 24, 0)


def test_every_command_has_a_section_and_every_option_in_it_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"\n## growcache (\w+)\n", page) == list(COMMANDS.commands)
    for name, command in COMMANDS.commands.items():
        known = {o for each in command.params for o in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"`.*?(--[a-z][a-z-]+)", section(name))) - COMMON <= known


COMMON = {"--watch"}  # named where another command is told of


def test_every_line_of_run_has_the_keys_of_status(lines: tuple[Path, list[Any]]) -> None:
    (documented,) = keys(section("status"))
    top = {key for key in documented if "." not in key}
    for line in lines[1]:
        assert hold(documented, line) >= top
        assert set(line) == top
    assert lines[1][-1]["state"] == "stopped"
    assert {line["state"] for line in lines[1]} <= set(
        re.findall(r"`(\w+)`", section("status"))
    )


def test_status_as_json_has_these_keys_too(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (documented,) = keys(section("status"))
    mixed = replace(
        FULL,
        strata=[StratumStatus("rare", 4, 9, 1.0)],
        sources=[SourceStatus("s3://bucket/*.npy", 0.25, 9, 90.0, 1.5)],
        foreign_leases=[ForeignLeaseStatus("a.lease", "no permission", 0, 7, None, "wait")],
    )
    seen = hold(documented, json.loads(mixed.to_json()))
    with Lease.create(here / "cache", "train", [0, 1]):
        seen |= hold(documented, as_json("growcache status cache --json", capsys))
    assert seen == set(documented)


def test_the_tables_of_a_plan(write_tables: bool) -> None:
    inputs = plan_inputs(consume=1000.0, max_bytes="200GB", error=0.1)
    outcome = plan(inputs)
    warned = warnings_of(inputs, outcome)
    drawn_plan = drawn(Group(*pictures([Planned("", inputs, outcome, warned)])), 80)
    shown(
        "plan",
        f"$ growcache plan growcache.yaml --consume 1000\n{drawn_plan}",
        writes=write_tables,
    )
    (documented,) = keys(section("plan"))
    found = plan_values(inputs, outcome, warned)
    figures = {name for name in outcome.figures if f"`{name}`" in section("plan")}
    assert figures == set(outcome.figures)
    assert set(found) - figures == set(documented) - {"set", "*figures*"}
    assert {f"`{name}`" in section("plan") for name in outcome.curve} == {True}


def test_the_picture_of_a_status(write_tables: bool) -> None:
    history = StatusHistory()
    for second in range(600):
        history.add(second, Status(samples=min(92_160, 160 * second), bytes=0))
    picture = drawn(StatusPicture(FULL, history), 80)
    shown("status", f"$ growcache status cache --watch\n{picture}", writes=write_tables)
    for row in re.findall(r"^│ (\w+)", picture, re.MULTILINE):
        assert f"\n| {row} | " in section("status")


def test_the_picture_of_a_run_is_a_whole_one_of_this_kind() -> None:
    kept = (DOCS / "reference/run.svg").read_text(encoding="utf-8")
    made = as_svg(FULL, StatusHistory())
    for svg in (kept, made):
        text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
        for row in ("state", "cache", "samples", "rate", "coverage", "trouble", "readers"):
            assert row in text
    assert len(kept) < 40_000


FULL = Status(
    state="full",
    waiting_for="job train to read more shards once each (cache.min_uses)",
    shards=360,
    samples=92_160,
    bytes=24_870_000_000,
    max_bytes=25_000_000_000,
    drawn=131_072,
    population=1_000_000,
    population_samples=1_000_000.0,
    coverage=0.131072,
    evicted_samples=38_912,
    holes=1,
    failures=12,
    reuse=4.2,
    workers=2,
    samples_per_second=410.2,
    bytes_per_second=107_500_000.0,
    leases=[LeaseStatus("n", "train", "gpu7", 777, "train.py", 72.0, 350, open=True)],
    jobs=[JobStatus("train", 550_502, 4.2, 12, 777, WaitsStatus(31, 4.9), open=True)],
    listing_complete=True,
    fingerprint="f" * 32,
    path="/nvme/cache",
    pid=4711,
    host="gpu7",
    command="growcache run growcache.yaml",
    started_at=1.0,
    updated_at=601.0,
    uptime_seconds=600.0,
    budget_bytes=130_000_000,
    catalog_bytes=40_000_000,
    retired_bytes=530_000_000,
    retired_shards=8,
    reserved_bytes=67_000_000,
    egress_bytes=34_400_000_000,
    delivered=550_502,
    objects=10_000,
    retries=12,
    last_errors=["s3://bucket/recordings/subject-17/night.npy: 503 SlowDown"],
    worker_states=[
        WorkerStatus(0, 4712, "reading", "p-512", 150, 256),
        WorkerStatus(1, 4713, "writing", "p-513", 256, 256, "node-7"),
    ],
    sample_bytes=262_144,
    full=True,
)


def test_what_init_says(
    here: Path, capsys: pytest.CaptureFixture[str], write_tables: bool
) -> None:
    command = "growcache init new.yaml --url 'data/*.npy' --yes"
    assert main(shlex.split(command)[1:]) == 0
    said = capsys.readouterr()
    found = re.sub(r"A read took .*", READ_TIME, said.err)  # a busy machine reads more slowly
    lines = [textwrap.fill(line, 80) for line in (found + said.out).splitlines()]
    shown("init", "\n".join([f"$ {command}", *lines]), writes=write_tables)


def test_what_check_says(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    write_tables: bool,
) -> None:
    (documented,) = keys(section("check"))
    assert as_json("growcache check cache --json", capsys) == {
        "ok": True,
        "shards": len(list((here / "cache" / "shards").glob("*.json"))),
        "findings": [],
    }
    path = here / "cache" / "shards" / "00000001.tfrecord"
    whole = path.read_bytes()
    path.write_bytes(whole[:300] + b"?" + whole[301:])
    text = output("growcache check cache", capsys, 1)
    text = re.sub(r"[0-9a-f]{32}", lambda match: f"{match[0][:8]}…", text)
    shown("check", text.replace(str(here), HOME), writes=write_tables)
    found = as_json("growcache check cache --json", capsys, 1)
    shutil.copytree(here / "cache", here / "again" / "cache")
    path.write_bytes(whole)
    assert hold(documented, found) == set(documented)
    monkeypatch.chdir(here / "again")
    text = output("growcache check cache --repair", capsys)
    text = re.sub(r"[0-9a-f]{32}", lambda match: f"{match[0][:8]}…", text)
    shown("check --repair", text.replace(f"{here}/again", HOME), writes=write_tables)
    assert as_json("growcache check cache --json", capsys)["ok"]


def test_what_peek_says(
    here: Path, capsys: pytest.CaptureFixture[str], write_tables: bool
) -> None:
    documented, again = keys(section("peek"))
    some = output("growcache peek cache", capsys)
    shown("peek", some.replace(str(here), HOME), writes=write_tables)
    one = output("growcache peek cache --sample 1:0", capsys)
    one = re.sub(r"etag .*", 'etag   "5b0c6a1e-280"', one)
    shown("peek --sample", one.replace(str(here), HOME), writes=write_tables)
    seen = hold(documented, as_json("growcache peek cache --json", capsys))
    assert seen == set(documented)
    made = output("growcache peek cache --sample 1:0 --refetch --config growcache.yaml", capsys)
    shown("peek --refetch", made.replace(str(here), HOME), writes=write_tables)
    told = as_json(
        "growcache peek cache --sample 1:0 --refetch --config growcache.yaml --json", capsys
    )
    assert hold(again, told) == set(again)


def test_what_replay_says(
    here: Path, capsys: pytest.CaptureFixture[str], write_tables: bool
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "min_samples": 1, "job": "replayed"}
    with EpochLoader("cache", journal="run.journal", **options) as loader:
        list(loader)
    (documented,) = keys(section("replay"))
    command = "growcache replay growcache.yaml run.journal --step 1"
    said = output(command, capsys)
    shown("replay", said.replace(str(here), HOME), writes=write_tables)
    assert hold(documented, as_json(f"{command} --json", capsys)) == set(documented)
    steps = as_json("growcache replay growcache.yaml run.journal --json", capsys)
    assert [steps["steps"], steps["sessions"]] == [24 // 4, 1]


def test_what_export_says(
    here: Path, capsys: pytest.CaptureFixture[str], write_tables: bool
) -> None:
    said = output("growcache export cache copy", capsys)
    said = re.sub(r"\([\d.]+ kB\)", "(29.4 kB)", said)  # it hangs on how long names are
    shown("export", said, writes=write_tables)
