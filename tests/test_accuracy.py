"""The benchmark of accuracy: its statistics, its results files, and the order of its data."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.accuracy.cache_size import WINDOW, windows
from benchmarks.accuracy.claims import reuse_claims
from benchmarks.accuracy.metrics import BITS_PER_BYTE
from benchmarks.accuracy.models import text_model
from benchmarks.accuracy.page import PAGE, TABLES, filled, hard_case_tables
from benchmarks.accuracy.results import Row, append_run, final_metrics, read_rows
from benchmarks.accuracy.statistics import (
    Interval,
    crossing,
    crossing_interval,
    effective_samples,
    first_reaching,
    mean_interval,
    not_worse,
    paired_differences,
    visit_worth,
)
from benchmarks.accuracy.tables import markdown, reuse_limit
from benchmarks.accuracy.training import Batch, bits_per_byte
from benchmarks.accuracy.wheels import held_out, python_text

metrics = st.floats(-100, 100, allow_subnormal=False)
by_seed = st.dictionaries(st.integers(0, 20), metrics)
uses = st.lists(st.integers(0, 50), min_size=1, max_size=30)


@given(by_seed, by_seed)
def test_only_runs_with_the_same_seed_are_compared(
    arm: dict[int, float], reference: dict[int, float]
) -> None:
    differences = paired_differences(arm, reference)
    assert len(differences) == len(arm.keys() & reference.keys())
    assert np.array_equal(differences, -paired_differences(reference, arm))


@given(st.lists(metrics, min_size=1, max_size=20), metrics)
def test_an_interval_holds_its_mean_and_moves_with_the_values(
    values: list[float], shift: float
) -> None:
    interval = mean_interval(values)
    assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9
    moved = mean_interval([value + shift for value in values])
    assert moved == pytest.approx(tuple(end + shift for end in interval), abs=1e-9)


@given(metrics, metrics, st.floats(0.01, 10))
def test_a_verdict_is_never_both(low: float, high: float, margin: float) -> None:
    low, high = sorted((low, high))
    verdict = not_worse(Interval((low + high) / 2, low, high), margin)
    assert verdict != "as good" or low > -margin
    assert verdict != "worse" or high < -margin
    assert not_worse(Interval(low, low, low), margin) in (
        ("as good",) if low > -margin else ("worse", "undecided")
    )


@given(uses, st.integers(1, 9))
def test_the_effective_sample_size_knows_no_scale_and_no_unused_samples(
    counts: list[int], factor: int
) -> None:
    size = effective_samples(counts)
    assert size <= sum(count > 0 for count in counts) + 1e-9
    assert effective_samples([factor * count for count in counts] + [0]) == pytest.approx(size)


@given(st.integers(1, 10_000), st.integers(1, 64), st.floats(0, 1))
def test_samples_of_one_visit_are_worth_between_one_and_all(
    samples: int, per_visit: int, correlation: float
) -> None:
    worth = visit_worth(samples, per_visit, correlation)
    assert samples / per_visit - 1e-6 <= worth <= samples


LEVELS = [1, 2, 4, 8, 16]
losses = st.lists(st.floats(0, 5), min_size=len(LEVELS), max_size=len(LEVELS))


@given(losses, st.floats(0.1, 5), st.floats(0.1, 5))
def test_a_wider_margin_is_exceeded_later(found: list[float], one: float, other: float) -> None:
    one, other = sorted((one, other))
    assert crossing(LEVELS, found, one) <= crossing(LEVELS, found, other) + 1e-9
    assert crossing(LEVELS, found, max(found) + 0.1) == math.inf


def test_seeds_that_agree_leave_no_doubt_about_the_crossing() -> None:
    interval = crossing_interval(LEVELS, np.array([[0, 0, 0, 1, 2]] * 5, np.float64), 0.5)
    assert interval == pytest.approx((math.sqrt(32),) * 3)


@given(st.lists(st.tuples(st.integers(0, 99), metrics), max_size=20), metrics)
def test_nothing_before_the_first_place_has_the_target(
    curve: list[tuple[int, float]], target: float
) -> None:
    place = first_reaching(curve, target)
    assert (place is None) == all(metric < target for _, metric in curve)


@given(st.integers(2, 9), st.integers(20, 200), st.integers(0, 99))
def test_held_out_samples_are_of_every_class(classes: int, each: int, seed: int) -> None:
    labels = np.arange(classes * each) % classes
    marked = held_out(labels, len(labels) // 5, seed)
    share = np.bincount(labels[marked], minlength=classes)
    assert marked.sum() == len(labels) // 5
    assert share.max() - share.min() <= 1


@given(st.dictionaries(st.integers(0, 9), st.floats(1, 8), min_size=1), st.floats(-5, 5))
def test_fewer_bits_per_byte_are_better(bits: dict[int, float], percent: float) -> None:
    arm = {seed: value * (1 + percent / 100) for seed, value in bits.items()}
    difference = mean_interval(BITS_PER_BYTE.differences(arm, bits))
    assert difference == pytest.approx((percent,) * 3, abs=1e-9)
    if abs(percent) > 1e-6:
        assert BITS_PER_BYTE.is_better(difference) == (percent < 0)
    if abs(percent - 1) > 1e-6:
        assert BITS_PER_BYTE.verdict(difference) == ("as good" if percent < 1 else "worse")


def test_a_model_that_knows_nothing_needs_eight_bits_and_sees_nothing_later() -> None:
    model = text_model(0)
    text = torch.arange(4 * 40, dtype=torch.uint8).reshape(4, 40)
    changed = text.clone()
    changed[:, 20:] = 7
    assert torch.equal(model(text)[:, :, :20], model(changed)[:, :, :20])
    for weights in model.parameters():
        nn.init.zeros_(weights)
    assert bits_per_byte(model, Batch(text, text)) == pytest.approx(8)


@given(st.binary(max_size=4 * WINDOW))
def test_windows_are_the_text_in_its_order(text: bytes) -> None:
    cut = windows(np.frombuffer(text, np.uint8))
    assert text.startswith(cut.tobytes())
    assert len(text) - cut.size < WINDOW


def test_text_of_a_wheel_is_its_recorded_files_in_the_order_of_names(tmp_path: Path) -> None:
    files = {"b/z.py": "z", "b/a.py": "first", "b/data.bin": "no", "b-1.dist-info/RECORD": ""}
    files["b-1.dist-info/RECORD"] = "".join(f"{name},sha256=x,1\n" for name in files)
    with zipfile.ZipFile(tmp_path / "b-1-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("unrecorded.py", "no")
    text = python_text(tmp_path / "b-1-py3-none-any.whl", 100)
    assert text.tobytes() == b"firstz"


def write_run(path: Path, arm: str, seed: int, metric: float, reuse: float = 1.0) -> None:
    rows = [
        Row("reuse", arm, seed, step, 0.5, metric + step, 10**6 * step, "c0ffee", "2 cores")
        for step in (1, 2, 3, 4)
    ]
    append_run(path, [*rows[:-1], rows[-1]._replace(figures=json.dumps({"reuse": reuse}))])


def test_runs_that_are_there_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "reuse.csv"
    assert read_rows(path) == {}
    for seed in (0, 1):
        write_run(path, "a, b", seed, 90.0)
    assert len(path.read_text().splitlines()) == 9
    assert final_metrics(read_rows(path), "reuse") == {"a, b": {0: 93.0, 1: 93.0}}


def test_the_table_compares_each_arm_with_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "reuse.csv"
    for times, loss in ((1, 0.0), (2, 0.25), (8, 0.75)):
        for seed in range(5):
            write_run(path, f"growing {times}", seed, 90.0 + seed - loss, times)
    curves = read_rows(path)
    assert markdown(curves, "reuse", "growing 1").splitlines()[2:] == [
        "| growing 1 | 5 | 95.00 | reference |  | 1 | 4.0 |",
        "| growing 2 | 5 | 94.75 | -0.25 (-0.25 to -0.25) | as good | 2 | 4.0 |",
        "| growing 8 | 5 | 94.25 | -0.75 (-0.75 to -0.75) | worse | 8 | 4.0 |",
    ]
    assert reuse_limit(curves, "reuse", "growing") == pytest.approx((4.0, 4.0, 4.0))


def test_a_table_takes_the_place_of_the_last_one_and_nothing_else_changes() -> None:
    page = "before\n<!-- results: reuse -->\n\n| old |\n\n<!-- end of results -->\nafter\n"
    once = filled(page, {"reuse": "| new |"})
    assert once == page.replace("old", "new")
    assert filled(once, {"reuse": "| new |"}) == once
    with pytest.raises(ValueError, match="no place for hard_case"):
        filled(page, {"hard_case": "| new |"})


def test_the_page_has_a_place_for_every_experiment() -> None:
    assert filled(PAGE.read_text("utf-8"), dict.fromkeys(TABLES, "| new |")).count(
        "| new |"
    ) == len(TABLES)


def test_arms_are_ordered_by_what_their_samples_are_worth(tmp_path: Path) -> None:
    path = tmp_path / "hard_case.csv"
    for per_visit, metric in ((1, 95.0), (5, 93.0), (50, 80.0)):
        for seed in range(5):
            row = Row(
                "digits by class",
                f"visits of {per_visit}, fifo",
                seed,
                1,
                0.5,
                metric,
                1,
                "c",
                "m",
            )
            append_run(path, [row._replace(figures=json.dumps({"ess_samples": 1_000.0}))])
    assert "| visits of 5, fifo | 539 |" in hard_case_tables(read_rows(path))
    assert "| rank correlation 1.00 | holds |" in hard_case_tables(read_rows(path))


@pytest.mark.parametrize(
    ("seeds", "loss", "verdict"),
    [(4, 0.0, "too few seeds yet"), (5, 0.0, "holds"), (5, 1.0, "**lost**")],
)
def test_a_claim_is_judged_by_its_worst_arm(
    tmp_path: Path, seeds: int, loss: float, verdict: str
) -> None:
    path = tmp_path / "reuse.csv"
    for times in (1, 2, 4):
        for seed in range(seeds):
            row = Row(
                "reuse of digits",
                f"growing {times}",
                seed,
                1,
                0.5,
                95.0 - loss * (times == 4),
                1,
                "c",
                "m",
            )
            append_run(path, [row])
    assert reuse_claims(read_rows(path))[0].row().endswith(f"| {verdict} |")
