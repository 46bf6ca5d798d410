"""The benchmark against peers: it runs, it proves what is delivered, and it wrote its page."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.cases import BATCH, FULL, Case
from benchmarks.peers.children import Child, ContestantError
from benchmarks.peers.cost import cpu_seconds, ticks_alone
from benchmarks.peers.environments import PINNED, TORCH
from benchmarks.peers.goals import Goal, goals
from benchmarks.peers.loops import Limits, one_round
from benchmarks.peers.page import IDLE, PAGE, STEPS, TRIED, measured, number, settings, written
from benchmarks.peers.picture import svg
from benchmarks.peers.proof import digest, expected, joined, repeated, summed
from benchmarks.peers.results import Results
from benchmarks.peers.roster import CONTESTANTS, OWN, Contestant
from benchmarks.peers.rounds import Match, Plan, running

TINY = replace(FULL["3KiB"], samples=256, shards=2)
RAGGED = replace(FULL["ragged"], samples=128, shards=2)
BOTH = ("growcache", "dataloader_mmap")  # first and last setting
PLAN = Plan(rounds=1, seconds=0.05, trial_seconds=0.02, lead_seconds=0.02)


def here() -> list[Contestant]:
    """Those that need no environment of their own, in one or two settings."""
    names = [c.module for c in CONTESTANTS.values() if c.environment == OWN]
    if importlib.util.find_spec("lmdb"):
        names.append("lmdb_rows")
    chosen = []
    for contestant in (CONTESTANTS[name] for name in names):
        settings = list(contestant.settings.items())
        kept = {0, len(settings) - 1} if contestant.module in BOTH else {0}
        chosen.append(replace(contestant, settings=dict(settings[i] for i in sorted(kept))))
    return chosen


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("case", [TINY, RAGGED])
def test_all_contestants_deliver_the_same_samples(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    chosen = here() if case is TINY else [here()[0], here()[3]]
    found = Results(case.name, {"step_seconds": case.step_seconds})
    pythons = {c.environment: Path(sys.executable) for c in chosen}
    with running(chosen, case, tmp_path / "data", pythons) as children:
        match = Match(case, children, found, tmp_path / "data", tmp_path)
        match.write()
        assert match.versions()["numpy"] == np.__version__
        match.try_settings(PLAN)
        match.play(PLAN)
    assert found.failures == {}
    for contestant in chosen:
        for loop in ("idle", "steps", "gil"):
            (only,) = found.rounds_of(contestant.module, loop)
            assert loop != "idle" or only["digest"] == expected(case)
    assert {goal.case for goal in goals({case.name: found})} <= {case.name}
    assert Results.read(tmp_path, case.name) == found


def test_a_contestant_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    chosen = [replace(c, settings={"": {"odd": 1}}) for c in here()[1:2]]
    found = Results("3KiB")
    with running(chosen, TINY, tmp_path, {OWN: Path(sys.executable)}) as children:
        match = Match(TINY, children, found, tmp_path, tmp_path)
        match.try_settings(PLAN)
        match.play(PLAN)
    (why,) = found.failures.values()
    assert "unexpected keyword argument 'odd'" in why
    assert found.rounds == []


def test_no_child_outlives_its_end(tmp_path: Path) -> None:
    others = set(psutil.Process().children())
    with Child(CONTESTANTS["memcpy"], TINY, tmp_path / "m", Path(sys.executable)) as child:
        child.ready()
        (process,) = set(psutil.Process().children()) - others
        process.suspend()
        with pytest.raises(ContestantError, match="did not answer in 0 s"):
            child.ask(0, do="write")
        child.close(patience_seconds=0)
    assert not process.is_running()


@contextmanager
def source(*epochs: list[Any]) -> Iterator[Any]:
    class Source:
        def __init__(self) -> None:
            self.left = list(epochs)

        def __iter__(self) -> Iterator[Any]:
            return iter(self.left.pop(0) if len(self.left) > 1 else self.left[0])

    yield Source()


def batches(case: Case, rows: np.ndarray[Any, Any]) -> list[Any]:
    values = case.all_values()
    parts = rows.reshape(-1, BATCH)
    return [joined([values[i] for i in part.tolist()], part) for part in parts]


@pytest.mark.parametrize("case", [TINY, RAGGED], ids=lambda case: case.name)
def test_a_whole_epoch_in_any_order_is_proven(case: Case) -> None:
    order = np.random.default_rng(1).permutation(case.samples)
    limits = Limits(0.01, None)
    result = one_round(lambda: source(batches(case, order)), case, "idle", limits)
    assert result["digest"] == expected(case)
    assert result["gap_seconds"]
    assert result["bytes_per_second"] > 0


@pytest.mark.parametrize("timed", [False, True])
def test_a_sample_that_comes_twice_is_noticed(timed: bool) -> None:
    good = np.arange(TINY.samples)
    bad = good.copy()
    bad[7] = 8
    epochs = [good, bad] if timed else [bad]
    lists = [batches(TINY, epoch) for epoch in epochs]
    with pytest.raises(RuntimeError, match=r"label 8 came 2 times"):
        one_round(lambda: source(*lists), TINY, "idle", Limits(0.05, None))


def test_samples_that_are_missing_are_noticed() -> None:
    lists = batches(TINY, np.arange(TINY.samples))[1:]
    with pytest.raises(RuntimeError, match=r"192 samples instead of 256"):
        one_round(lambda: source(lists), TINY, "idle", Limits(0.01, None))


@given(row=st.integers(0, BATCH - 1), place=st.sampled_from([0, 1536, 3071]))
def test_another_byte_is_another_digest(row: int, place: int) -> None:
    x, y = joined(TINY.all_values()[:BATCH], np.arange(BATCH))
    changed = x.reshape(BATCH, -1).copy()
    changed[row, place] ^= 1
    assert digest((changed, y)) != digest((x, y))
    assert digest((x[::-1].copy(), y[::-1].copy())) == digest((x, y))
    assert digest((x, np.roll(y, 1))) != digest((x, y))


def test_labels_of_no_sample_are_noticed() -> None:
    assert repeated(TINY, np.array([0, TINY.samples]), whole=False)
    assert repeated(TINY, np.arange(3), whole=False) is None
    assert summed([2**64 - 1, 2]) == 1


def test_the_cpu_time_of_living_children_counts() -> None:
    before = cpu_seconds()
    script = (
        "import time\nwhile time.process_time() < 0.3: pass\nprint('x', flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_seconds() - before >= 0.3
        child.communicate(b"\n")
    assert cpu_seconds() - before >= 0.3


def test_a_thread_alone_ticks() -> None:
    began = time.perf_counter()
    assert ticks_alone(0.02) > 0
    assert time.perf_counter() - began >= 0.02


def round_of(name: str, number: int, **figures: Any) -> dict[str, Any]:
    return {"contestant": name, "setting": "", "round": number, **figures}


def made_up() -> Results:
    found = Results("256KiB", {"step_seconds": 5e-3, "samples": 64, "data_bytes": 64 << 18})
    found.about |= {"date": "2026-01-01", "commit": "abc", "cores": 2, "cpu": "a CPU"}
    found.about |= {
        "memory_gib": 8,
        "load_before": 0.1,
        "kernel": "6",
        "python": "3.11",
        "versions": {"x": "1"},
    }
    speeds = {"growcache": [8e9, 12e9], "memcpy": [10e9, 10e9], "litdata": [1e9, 1e9]}
    for name, (one, two) in speeds.items():
        found.trials.append(round_of(name, 0, loop="idle", bytes_per_second=one))
        found.trials.append(round_of(name, 0, loop="steps", sustained_wait_seconds=1e-3))
        for n, speed in enumerate((one, two)):
            idle = {"bytes_per_second": speed, "sustained_bytes_per_second": 0.9 * speed}
            idle |= {"bytes": 10**9, "cpu_seconds": 0.5}
            found.rounds.append(round_of(name, n, loop="idle", **idle))
            steps = {"wait_seconds": 3e-4, "wait_p99_seconds": 1e-3, "stall_seconds": 1e-4}
            steps |= {"sustained_wait_seconds": 3.5e-4}
            found.rounds.append(round_of(name, n, loop="steps", **steps))
    return found


def test_ratios_are_medians_of_ratios_within_a_round_and_count_our_gaps_alone() -> None:
    found = {g.what: g for g in goals({"256KiB": made_up()})}
    assert found["speed, idle, × memcpy"].value == pytest.approx(0.9)
    assert found["speed, idle, × LitData"].value == pytest.approx(9.0)
    assert found["wait per step of pure Python, ms"].value == pytest.approx(0.35)
    assert found["speed, idle, × the fastest peer (LitData)"].met
    assert found["wait per step of pure Python, ms"].verdict == "met (≤ 0.4)"


def test_a_goal_that_is_missed_says_so() -> None:
    assert Goal("256KiB", "x", 0.79, 0.8).verdict == "MISSED (≥ 0.8)"
    assert not Goal("3KiB", "x", 0.021, 0.02, at_most=True).met


def test_the_page_has_a_row_for_everyone_the_fastest_first() -> None:
    text = measured({"256KiB": made_up()})
    (idle,) = [rows for head, rows in tables(text) if head == list(IDLE)]
    assert [row[0] for row in idle] == ["**growcache**", "memcpy", "LitData"]
    assert idle[0][2:7] == ["10,000", "9,000", "–", "0.9", "1"]
    assert idle[2][6] == "9"
    assert "<svg" in svg({"256KiB": made_up()})


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (10823.4, "10,800"), (0.0123, "0.0123"), (1e-5, "0.00001"), (99.6, "99.6")],
)
def test_numbers_have_the_digits_that_they_can_carry(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_part_without_a_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no"):
        written("text", {"figures": "x"})


@pytest.mark.parametrize("path", sorted(PINNED.glob("*.txt")), ids=lambda path: path.stem)
def test_every_environment_pins_every_version_and_the_same_torch(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert TORCH in lines
    assert all(re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.]+", line) for line in lines)
    used = [c for c in CONTESTANTS.values() if c.environment == path.stem]
    names = {line.partition("==")[0] for line in lines}
    assert used
    assert all(set(c.packages) <= names for c in used)


PAGE_TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_was_written_by_the_program() -> None:
    parts = {"settings": settings()}
    assert written(PAGE_TEXT, parts) == PAGE_TEXT, "run python -m benchmarks.peers --page"
    heads = [head for head, _ in tables(PAGE_TEXT)]
    assert heads.count(list(IDLE)) == heads.count(list(STEPS)) == heads.count(list(TRIED)) > 0


def test_every_verdict_on_the_page_is_that_of_its_figure() -> None:
    (verdicts,) = [rows for head, rows in tables(PAGE_TEXT) if head[-1] == "goal"]
    for row in verdicts:
        found = re.fullmatch(r"(met|MISSED) \((≤|≥) ([\d.]+)\)", row[-1])
        assert found is not None, row
        value, bound = float(row[-2].replace(",", "")), float(found[3])
        met = value <= bound if found[2] == "≤" else value >= bound
        assert (found[1] == "met") == met or value == pytest.approx(bound, rel=0.01)


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Every table of a page: its heading and its rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *rows = (
            [c.strip() for c in r.strip("|").split(" | ")] for r in block.split("\n") if r
        )
        found.append((head, rows))
    return found
