"""The picture of a status: what a person must be able to read off it."""

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from growcache.cache.status_model import LeaseStatus, Status, WorkerStatus
from growcache.cli.status import StatusHistory, status_sentence
from growcache.cli.view import StatusPicture, bar_text, curve_text

MB = 1_000_000


def drawn(renderable: object, width: int = 100, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def status(**changes: object) -> Status:
    values: dict[str, object] = {
        "state": "running",
        "path": "/nvme/cache",
        "pid": 42,
        "host": "gpu7",
        "max_bytes": 1000 * MB,
        "bytes": 500 * MB,
        "budget_bytes": 20 * MB,
        "catalog_bytes": 30 * MB,
        "shards": 97,
        "samples": 24310,
        "drawn": 31004,
        "evicted_samples": 6694,
        "listing_complete": True,
        "population_samples": 1_020_000.0,
        "coverage": 0.031,
        "objects": 10_000,
    }
    return Status(**{**values, **changes})  # type: ignore[arg-type]


def reader(**changes: object) -> LeaseStatus:
    values = {
        "name": "n",
        "job": "train",
        "host": "gpu7",
        "pid": 777,
        "command": "python train.py",
        "age_seconds": 72.0,
        "shards": 90,
        "open": True,
    }
    return LeaseStatus(**{**values, **changes})  # type: ignore[arg-type]


def test_everything_that_matters_is_there() -> None:
    text = drawn(
        StatusPicture(
            status(
                samples_per_second=412,
                bytes_per_second=108 * MB,
                egress_bytes=8100 * MB,
                delivered=120_000,
                reuse=3.87,
                reserved_bytes=64 * MB,
                retired_bytes=100 * MB,
            )
        ),
        width=140,
    )
    for piece in (
        "24,310 cached in 97 shards · 31,004 drawn · 6,694 evicted",
        "120,000 samples delivered (each 3.9 times)",
        "412 samples/s · 108 MB/s",
        "8.10 GB in this run",
        "56 % of 1.00 GB · ░ free 436 MB · ▌ index 50.0 MB",
        "█ samples 350 MB · ▓ leaving 100 MB · ▒ writing 64.0 MB",
        "3.1 % of about 1.02 million samples in 10,000 objects",
        "pid 42 on gpu7",
        "/nvme/cache",
    ):
        assert piece in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "waiting", "waiting_for": "a reader to finish"}, "for a reader to finish"),
        ({"state": "full", "waiting_for": "use of old shards"}, "wait for use of old shards"),
        ({"state": "full"}, "replaces an old one"),
        ({"state": "complete"}, "it is at its limit, and nothing is evicted; nothing more is"),
        ({"state": "complete", "coverage": 1.0}, "everything is cached; nothing more is drawn"),
        ({"state": "stopped", "complete": True, "coverage": 1.0}, "everything is cached"),
        ({"state": "complete", "coverage": 1.0, "holes": 1}, "everything that can be read is"),
        ({"state": "stopped", "complete": True}, "none is needed: it is at its limit"),
        ({"state": "shrinking"}, "max_bytes was lowered"),
        ({"state": "stopped"}, "growcache run CONFIG"),
        ({"ramping": True, "evicted_samples": 0}, "first shards are small"),
        ({"full": True}, "replaces an old one"),
        ({"evicted_samples": 9}, "filling"),
        (
            {
                "full": True,
                "retired_shards": 3,
                "retired_bytes": 9 * MB,
                "worker_states": [WorkerStatus(0, 7, "waiting")],
            },
            "samplers wait until readers release 3 old shards",
        ),
    ],
)
def test_the_state_is_said_in_words(changes: dict[str, object], words: str) -> None:
    text = drawn(StatusPicture(status(**changes)), width=140)
    assert words in text
    assert str(changes.get("state", "running")) in text


def test_the_time_until_full_follows_from_the_growth() -> None:
    history = StatusHistory()
    for second in range(11):
        history.add(float(second), status(bytes=(400 + 10 * second) * MB))
    filling = status(bytes=500 * MB, evicted_samples=0)
    assert history.bytes_per_second() == pytest.approx(10 * MB)
    assert "full in about 50 s" in drawn(StatusPicture(filling, history))


def test_trouble_is_counted_and_its_last_message_shown() -> None:
    assert "none" in line_of("trouble", drawn(StatusPicture(status())))
    text = drawn(
        StatusPicture(
            status(failures=12, holes=1, restarts=2, last_errors=["old", "503 SlowDown"])
        ),
        width=120,
    )
    assert "12 failed attempts (tried again) · 1 hole (unreadable, left out)" in text
    assert "2 sampler restarts" in text
    assert "last: 503 SlowDown" in text


def test_each_sampler_is_shown_and_many_are_counted() -> None:
    few = drawn(
        StatusPicture(status(worker_states=[WorkerStatus(0, 7, "reading", "p", 12, 64)]))
    )
    assert "0 reading" in few
    assert "12 of 64 reads" in few
    many = [WorkerStatus(i, i, "reading" if i < 6 else "waiting") for i in range(8)]
    assert "6 reading · 2 waiting" in drawn(StatusPicture(status(worker_states=many)))


def test_who_holds_shards_is_named() -> None:
    leases = [reader(), reader(job="sweep", open=False, shards=1)]
    text = drawn(StatusPicture(status(leases=leases)), width=120)
    assert "train  holds 90 shards for 1 min 12 s  pid 777 on gpu7: python train.py" in text
    assert (
        "kept for a dead reader: 1 shard, job sweep (pid 777); release them with: growcache"
        in text
    )
    assert "and 3 more" in drawn(StatusPicture(status(leases=[reader()] * 7)))


def test_an_unlisted_or_unknowable_population_has_no_coverage() -> None:
    listing = status(listing_complete=False, objects=3000, coverage=None)
    assert "3,000 objects so far" in drawn(StatusPicture(listing))
    assert "not known yet" in drawn(StatusPicture(status(coverage=None)))


def test_without_unicode_it_is_drawn_in_ascii() -> None:
    text = drawn(
        StatusPicture(status(reserved_bytes=64 * MB), StatusHistory()), encoding="ascii"
    )
    assert text.isascii()
    assert "? " not in text
    assert "#" * 20 in line_of("cache", text)


@given(
    st.lists(st.integers(-5, 10**12), min_size=1, max_size=5),
    st.integers(0, 10**12),
    st.integers(1, 200),
)
def test_a_bar_is_exactly_as_wide_as_told(amounts: list[int], total: int, width: int) -> None:
    parts = [(amount, "red", "█") for amount in amounts]
    assert len(drawn(bar_text(parts, total, width), width=200).rstrip("\n")) == width


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=600), st.integers(1, 120))
def test_a_long_history_stays_small_and_keeps_its_ends(counts: list[int], width: int) -> None:
    history = StatusHistory()
    for i, count in enumerate(counts):
        history.add(i * 0.5, Status(samples=count))
    assert len(history.points) <= 240
    curve = history.curve(width)
    assert len(curve) <= max(2, width)
    assert (curve[0], curve[-1]) == (counts[0], counts[-1])
    assert len(drawn(curve_text(history, 100)).splitlines()) == 1


@given(st.integers(30, 200))
def test_no_width_breaks_the_frame(width: int) -> None:
    text = drawn(
        StatusPicture(status(leases=[reader()], failures=1, last_errors=["x" * 300])), width
    )
    assert {len(line) for line in text.splitlines()} == {min(width, 120)}


@settings(max_examples=30)
@given(st.integers(30, 130), st.integers(1, 40))
def test_a_picture_is_no_higher_than_there_are_lines(width: int, height: int) -> None:
    leases = [reader(job=name) for name in "abcd"]
    shown = status(leases=leases, failures=1, last_errors=["x" * 300], delivered=1)
    lines = drawn(StatusPicture(shown, StatusHistory(), height), width).splitlines()
    assert len(lines) <= height
    assert "running" in "".join(lines[:2])  # the state goes last


def test_what_matters_least_goes_first() -> None:
    text = drawn(
        StatusPicture(status(worker_states=[WorkerStatus(0)], failures=1), StatusHistory(), 11),
        80,
    )
    assert "samplers" not in text
    assert "growth" not in text
    assert "1 failed attempt" in text


def test_no_row_ends_within_a_figure() -> None:
    lines = drawn(StatusPicture(status(egress_bytes=8100 * MB)), 50).splitlines()
    assert any("31,004 drawn · 6,694 evicted" in line for line in lines)
    assert any("8.10 GB in this run" in line for line in lines)
    assert not any(line.rstrip("│ ").endswith("·") for line in lines)


def test_a_long_reason_is_shortened_where_it_names_the_object() -> None:
    key = "s3://lab/" + "a very long name " * 9 + "7.npy"
    why = f"{key}: 503 SlowDown; given up after 6 tries"
    text = drawn(StatusPicture(status(failures=1, last_errors=[why])), 80)
    assert "7.npy: 503 SlowDown; given up after 6 tries" in line_of("last:", text)
    waiting = status(state="waiting", waiting_for=f"the store to answer ({why})")
    for width in (60, 80, 120):
        shown = drawn(StatusPicture(waiting, StatusHistory()), width).splitlines()
        assert "cache" in shown[3]  # the state took two lines
        assert "503 SlowDown" in " ".join(shown)


STARVED: dict[str, object] = {
    "uptime_seconds": 60.0,
    "worker_states": [WorkerStatus(0, 7, "reading", "p", 0, 64)],
    "evicted_samples": 0,
}


def test_what_helps_is_said_where_the_service_waits() -> None:
    event = "free space on the disk: it is full"
    full_disk = status(state="waiting", waiting_for=event, waiting_reason="disk")
    assert "or lower cache.max_bytes or cache.min_free" in drawn(StatusPicture(full_disk))
    event = "the listing to end: room is kept for it"
    listing = status(state="waiting", waiting_for=event, waiting_reason="listing")
    assert "advice" not in drawn(StatusPicture(listing))


def test_no_end_is_foretold_while_nothing_comes() -> None:
    history = StatusHistory()
    for second in range(11):
        history.add(float(second), status(bytes=(400 + second) * MB))
    assert "nothing has come from the store" in drawn(StatusPicture(status(**STARVED), history))
    for coming in ({"bytes_per_second": 1.0}, {"samples_per_second": 1.0}):
        assert "full in about" in drawn(StatusPicture(status(**STARVED, **coming), history))


def test_a_source_that_fits_in_is_cached_before_the_bound_is_reached() -> None:
    history = StatusHistory()
    for second in range(11):
        held = {"bytes": (400 + second) * MB, "samples": 20_000 + 100 * second}
        history.add(float(second), status(**held))
    few = status(evicted_samples=0, population_samples=25_000.0, coverage=0.92)
    assert "all of it cached in about 20 s" in drawn(StatusPicture(few, history))
    assert "full in about" in drawn(StatusPicture(status(evicted_samples=0), history))


def test_a_source_that_nobody_can_count_is_said_to_be_one() -> None:
    endless = status(coverage=None, population_samples=None, objects=0, endless=True)
    assert "unknown, because your function draws" in line_of(
        "coverage", drawn(StatusPicture(endless))
    )
    unfinished = status(state="stopped", listing_complete=False, coverage=None)
    assert "no listing was completed" in line_of("coverage", drawn(StatusPicture(unfinished)))


def test_samplers_are_started_before_they_are_restarted() -> None:
    ended = [WorkerStatus(0, None, "restarting")]
    assert "0 starting" in drawn(StatusPicture(status(worker_states=ended)))
    assert "0 restarting" in drawn(StatusPicture(status(worker_states=ended, restarts=1)))


def test_parts_of_the_bar_differ_without_colours() -> None:
    text = drawn(StatusPicture(status(retired_bytes=100 * MB, reserved_bytes=64 * MB)), 120)
    bar = line_of("cache", text).strip("│ ").split()[-1]
    assert sorted(set(bar)) == sorted("█▓▒▌░")


def test_one_is_singular() -> None:
    one = status(samples=1, shards=1, drawn=1, delivered=1, failures=1, holes=1, restarts=1)
    for text in (drawn(StatusPicture(replace(one, objects=1)), 120), status_sentence(one)):
        assert not re.search(r"\b1 (samples|shards|objects|attempts|holes|restarts)\b", text)


def test_the_curve_ends_with_what_there_is_now() -> None:
    history = StatusHistory()
    history.add(0.0, status(samples=0))
    history.add(1.0, status(samples=7))
    history.add(1.1, status(samples=9))
    assert history.curve(3) == [0, 9]


def line_of(label: str, text: str) -> str:
    return next(line for line in text.splitlines() if f" {label} " in line)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_nothing_jumps_while_a_cache_fills_and_turns_over(width: int) -> None:
    history = StatusHistory()
    shown: list[dict[str, object]] = [
        {"state": "waiting", "waiting_for": "samplers to start"},
        {"state": "running", "samples_per_second": 12.0},
        {"state": "running", "bytes": 999 * MB, "full": True, "samples": 999_999},
        {"state": "running", "reserved_bytes": 131_000, "retired_bytes": 199 * MB},
        {
            "state": "waiting",
            "waiting_reason": "readers",
            "waiting_for": "readers to release shards: one snapshot is held, the oldest for "
            "12 s by job training (pid 4711 on gpu7)",
        },
    ]
    heights = set()
    for at, changes in enumerate(shown):
        history.add(float(at), status(delivered=1, **changes))
        heights.add(
            drawn(StatusPicture(status(delivered=1, **changes), history), width).count("\n")
        )
    assert len(heights) == 1


def test_a_stopped_cache_that_is_empty_holds_no_bytes_of_samples() -> None:
    text = drawn(StatusPicture(status(state="stopped", samples=0, shards=0, sample_bytes=4096)))
    assert "samples 0 B" in text
    some = drawn(StatusPicture(status(state="stopped", samples=1000, sample_bytes=4096)))
    assert "samples 4.10 MB" in some


def test_a_cache_that_no_service_ever_filled_has_no_bound() -> None:
    copied = Status(state="stopped", path="/copy", samples=30, shards=3, bytes=9 * MB)
    text = drawn(StatusPicture(copied))
    assert "9.00 MB on disk" in text
    assert " 0 B" not in text
    assert "not known" in line_of("coverage", text)
