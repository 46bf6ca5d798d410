"""The pure parts of the harness detect the faults that they exist to detect."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.cache.check import Finding
from growcache.cache.index.schema import CacheTotals, ShardState
from growcache.cache.sidecar import Origins, SampleOrigin, Sidecar
from growcache.schema import Schema
from tests.chaos import checks, schedule
from tests.chaos.checks import Circumstances, Leftovers
from tests.chaos.content import CHANGING, ROWS, WORDS, key_name, object_bytes, samples, wrong
from tests.chaos.disk import Seen
from tests.chaos.flips import Flip, became
from tests.chaos.ledger import Books, Ledger, Row
from tests.chaos.readers import Line
from tests.chaos.schedule import plan
from tests.chaos.states import Observation, current
from tests.chaos.tally import BEGIN, END, Tally, markdown, write_section

LIVE, RETIRED, DELETED = ShardState.LIVE, ShardState.RETIRED, ShardState.DELETED


def test_a_round_is_a_function_of_seed_and_number() -> None:
    everything = schedule.EVERYTHING
    assert plan(3, 7, everything) == plan(3, 7, everything)
    assert plan(3, 7, everything).faults != plan(4, 7, everything).faults
    without = plan(3, 7, everything - {schedule.KILL})
    kept = [f for f in plan(3, 7, everything).faults if f.kind != schedule.KILL]
    assert list(without.faults) == kept


def test_everything_happens_in_half_an_hour() -> None:
    faults = [fault for n in range(300) for fault in plan(1, n, schedule.EVERYTHING).faults]
    assert {fault.kind for fault in faults} == schedule.EVERYTHING
    kills = [fault for fault in faults if fault.kind == schedule.KILL]
    assert len(kills) >= 300
    assert {fault.role for fault in kills} == set(schedule.ROLES)
    assert {fault.aim for fault in kills if fault.role == schedule.SUPERVISOR} == set(
        schedule.AIMS
    )
    assert sum(fault.kind == schedule.FILL for fault in faults) >= 20
    flips = (schedule.FLIP_SHARD, schedule.FLIP_SIDECAR, schedule.FLIP_INDEX)
    assert sum(fault.kind in flips for fault in faults) >= 100


@given(st.integers(0, 500), st.integers(0, 50), st.integers(0, WORDS * 64 - 1))
@settings(max_examples=50)
def test_no_flipped_bit_passes_for_a_sample(key: int, version: int, bit: int) -> None:
    batch = samples(np.array([[key, version, 0], [key, version, 1]], np.int64))
    assert not wrong(batch).any()
    batch.view(np.uint8).reshape(2, -1)[0, bit // 8] ^= 1 << (bit % 8)
    assert wrong(batch).tolist() == [True, False]


def test_no_mixture_of_two_versions_passes_for_a_sample() -> None:
    old, new = (np.load(io.BytesIO(object_bytes(5, version))) for version in (0, 1))
    assert old.shape == (ROWS, WORDS)
    assert not wrong(old).any()
    for words in (2, WORDS // 2, WORDS - 1):  # the first word is the key's number
        mixed = np.concatenate([old[:, :words], new[:, words:]], axis=1)
        assert wrong(mixed).all()


FLIP = Flip(schedule.FLIP_SHARD, 3, "d", Path("3"), (0, 0), 100.0)


def line(event: str, at: float = 110.0, **facts: object) -> Line:
    return Line(schedule.TORCH, event, at, facts)


VIOLATIONS: dict[str, Callable[[], Sequence[str]]] = {
    "above the bound": lambda: checks.bound(Seen(over=((10, 11),))),
    "samples vanish": lambda: checks.totals(
        CacheTotals(drawn=10, samples=4, evicted_samples=5), 0
    ),
    "files vanish": lambda: checks.totals(CacheTotals(lost_shards=1), 0),
    "a shard is damaged": lambda: checks.findings([Finding("error", 4, "digest")], {3}),
    "wrong, and nothing was flipped": lambda: checks.delivered_wrong(
        line("wrong", since=105.0, samples=1, heads=[]), Circumstances()
    ),
    "wrong, and flipped before the look": lambda: checks.delivered_wrong(
        line("wrong", since=105.0, samples=1, heads=[]), Circumstances([FLIP])
    ),
    "a file is missing": lambda: checks.reader_error(
        line("error", type="FileNotFoundError", message="3.tfrecord", since=1.0),
        Circumstances([FLIP], [(100, 120)], [(100, 120)]),
    ),
    "an undamaged index": lambda: checks.reader_error(
        line("error", type="CacheError", message="the index cannot be read", since=1.0),
        Circumstances(index_faults=[(90, 100)]),
    ),
    "no start": lambda: checks.restart(1.0, ready=False, words=""),
    "a slow start": lambda: checks.restart(11.0, ready=True, words=""),
    "an exit code": lambda: checks.stopped(Leftovers(exit_code=1)),
    "a process": lambda: checks.stopped(Leftovers(processes=[1])),
    "a lock": lambda: checks.stopped(Leftovers(locks=["supervisor.lock"])),
    "a temporary file": lambda: checks.stopped(Leftovers(temporary=["incoming/x"])),
    "a purged object in a shard": lambda: checks.purged(sidecar("a", 1, 7), {7: 1.0}),
    "a purged object in an export": lambda: checks.exported([1, 7, 7], {7: 1.0}),
    "a purged object in a later pass": lambda: checks.delivered_purged(
        line("beat", objects=[1, 7], since=105.0), {7: 104.0}
    ),
    "samples vanish, though nothing is purged": lambda: checks.totals(
        CacheTotals(drawn=10, samples=4), 0
    ),
    "no event named": lambda: checks.named("waiting", None),
    "no progress": lambda: checks.progress(False, checks.PROGRESS_SECONDS, None),
    "a reader that starves": lambda: checks.reading("torch", checks.PROGRESS_SECONDS),
}
NONE: dict[str, Callable[[], Sequence[str]]] = {
    "flipped after the look": lambda: checks.delivered_wrong(
        line("wrong", since=99.0, samples=1, heads=[]), Circumstances([FLIP])
    ),
    "an index that was damaged": lambda: checks.reader_error(
        line("error", type="CacheError", message="the index cannot be read", since=1.0),
        Circumstances(index_faults=[(105, 115)]),
    ),
    "a record flipped under TensorFlow": lambda: checks.reader_error(
        line("error", type="DataLossError", message="corrupted record", since=99.0),
        Circumstances([FLIP]),
    ),
    "balanced": lambda: checks.totals(CacheTotals(drawn=9, samples=4, evicted_samples=5), 0),
    "purging": lambda: checks.totals(CacheTotals(drawn=10, samples=4), 0, purging=True),
    "another object in a shard": lambda: checks.purged(sidecar("a", 1, 7), {2: 1.0}),
    "a purged object in a pass of before": lambda: checks.delivered_purged(
        line("beat", objects=[1, 7], since=103.0), {7: 104.0}
    ),
    "damaged on purpose": lambda: checks.findings([Finding("error", 3, "digest")], {3}),
    "clean": lambda: checks.stopped(Leftovers()),
    "a slow start of a busy machine": lambda: checks.restart(
        11.0, ready=True, words="", load=2.0
    ),
    "an event named": lambda: checks.named("waiting", "samplers to start"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_what_is_a_violation(name: str) -> None:
    assert VIOLATIONS[name]()


@pytest.mark.parametrize("name", NONE)
def test_what_is_none(name: str) -> None:
    assert NONE[name]() == []


def test_a_start_is_refused_on_a_full_disk_only() -> None:
    words = "growcache: no room on the disk for the index x: database or disk is full"
    assert checks.is_refusal(words, full=True)
    assert not checks.is_refusal(words, full=False)
    assert not checks.is_refusal("Traceback", full=True)


def test_what_becomes_of_a_flip() -> None:
    assert became(FLIP, {3: {"torch"}}, {3}, {3}) == "a loader"
    assert became(FLIP, {}, {3}, {3}) == "check"
    assert became(FLIP, {}, set(), {4}) == "evicted first"
    assert became(FLIP, {}, {4}, {3}) == "missed"


def books(*rows: tuple[int, int, ShardState]) -> Books:
    return Books(tuple(Row(n, seq, state, 8, f"{n}") for n, seq, state in rows), ())


def test_the_ledger_notices() -> None:
    ledger = Ledger()
    assert ledger.enter(books((0, 0, LIVE), (1, 1, LIVE))) == []
    assert ledger.enter(books((0, 0, DELETED), (1, 1, LIVE))) == []
    assert "again" in ledger.enter(books((0, 0, LIVE), (1, 1, LIVE)))[0]
    assert "twice" in ledger.enter(books((0, 0, DELETED), (1, 7, LIVE)))[0]
    assert "forgotten" in ledger.enter(books((0, 0, DELETED)))[0]
    assert not [t for t in ledger.enter(Books((), ((0, 1),))) if "forgotten" in t]


def sidecar(digest: str, *objects: int) -> Sidecar:
    schema = Schema.from_sample({"x": np.zeros(1)})
    drawn = [SampleOrigin(key_name(n), None, 9, None, 0, 1, 4, 5) for n in objects]
    origins = Origins.pack(drawn)
    return Sidecar("f", 0, 0, 5, 5, schema, len(drawn), 1, 8, 8, digest, origins)


def test_a_shard_drawn_twice_has_equal_bytes_where_its_objects_did_not_change() -> None:
    ledger = Ledger()
    steady, changing = (1, 7), CHANGING
    assert ledger.describe({5: sidecar("a", *steady, changing)}) == []
    assert ledger.describe({5: sidecar("b", *steady)}) == [], "an object was gone"
    assert ledger.describe({}) == []
    assert ledger.describe({5: sidecar("a", *steady, changing)}) == []
    assert ledger.redrawn == 1
    (other,) = ledger.describe({5: sidecar("c", *steady)})
    assert "was b, and is c" in other
    (less,) = ledger.describe({5: sidecar("d", 1)})
    assert "other samples of objects that stay" in less


def test_a_purge_takes_samples_out_of_a_shard_that_may_be_drawn_again() -> None:
    ledger = Ledger()
    assert ledger.describe({5: sidecar("a", 1, 7), 6: sidecar("b", 2)}) == []
    assert ledger.enter(books((5, 0, LIVE), (6, 1, LIVE))) == []
    ledger.purges({7})
    assert ledger.describe({5: sidecar("c", 1), 6: sidecar("b", 2)}) == []
    assert ledger.enter(books((6, 1, LIVE))) == [], "the row is away while it is rewritten"
    assert ledger.enter(books((5, 8, LIVE), (6, 1, LIVE))) == [], "it was drawn again"
    (less,) = ledger.describe({5: sidecar("d")})
    assert "other samples of objects that stay" in less
    (twice,) = ledger.enter(books((5, 8, LIVE), (6, 9, LIVE)))
    assert "shard 6 was committed twice" in twice
    (forgotten,) = ledger.enter(books((5, 8, LIVE)))
    assert "forgotten shard 6" in forgotten


def test_a_flip_is_not_turned_back_in_another_file(tmp_path: Path) -> None:
    path = tmp_path / "3"
    path.write_bytes(b"old")
    flip = Flip(schedule.FLIP_SHARD, 3, "d", path, (0, 0), 100.0, path.stat().st_ino)
    assert flip.is_there
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").rename(path)
    flip.heal()
    assert not flip.is_there
    assert path.read_bytes() == b"new"


def test_which_states_are_current() -> None:
    nothing = Observation(0, 0, frozenset(), {})
    assert current(nothing) == ()
    seen = Observation(
        9, 0, frozenset({1, 2, 3}), {1: LIVE, 2: RETIRED, 4: RETIRED, 5: DELETED}
    )
    assert current(seen) == (
        "reserved", "installing", "live", "retired", "deleting", "deleted",
    )  # fmt: skip
    assert current(Observation(9, 1, frozenset(), None)) == ("incoming",)


def test_the_tally_stands_in_its_section(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# P\n\n## Chaos runs\n\n## Turnover\n\ntext\n")
    tally = Tally(1)
    tally.killed(schedule.TORCH, ["live", "retired"])
    for _ in range(2):  # the second replaces the first
        write_section(page, markdown(tally))
    text = page.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert "| torch | 1 | 0 | 0 | 0 | 1 | 1 | 0 | 0 |" in text
    assert text.startswith("# P\n\n## Chaos runs\n\n<!-- chaos")
    assert text.endswith("## Turnover\n\ntext\n")
