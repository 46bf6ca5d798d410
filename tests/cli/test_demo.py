"""The demo: its data can be learnt, it runs from end to end, and it leaves nothing behind."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from growcache.cli import demo
from growcache.cli.demo_data import (
    CLASSES,
    held_out_windows,
    label,
    recording,
    write_recordings,
)
from growcache.schema import Origin


def test_recordings_are_a_function_of_the_seed(tmp_path: Path) -> None:
    write_recordings(tmp_path, 1)
    for name in CLASSES:
        stored = np.load(tmp_path / f"{name}-000.npy")
        assert stored.shape == (16384, 4)
        assert stored.dtype == np.float32
        np.testing.assert_array_equal(stored, recording(name, 0, seed=0))
        assert not np.array_equal(stored, recording(name, 0, seed=1))


@pytest.mark.parametrize("name", CLASSES)
def test_the_label_stands_in_the_name(name: str) -> None:
    sample = {"x": np.zeros((256, 4), np.float32)}
    made = label(sample, Origin(f"tmp/remote/{name}-012.npy", None, 0, 256))
    assert made["y"] == CLASSES.index(name)
    assert made["y"].dtype == np.int64


def test_held_out_windows_come_in_equal_numbers() -> None:
    x, y = held_out_windows(2, seed=1)
    assert x.shape[1:] == (256, 4)
    assert np.bincount(y).tolist() == [len(x) // 3] * 3


@pytest.mark.parametrize("width", [45, 60, 61, 78, 79, 200])
def test_the_table_of_epochs_fits(width: int) -> None:
    row = demo.EpochRow(12, 1456, 432, 4_880, 3_424, 0.0312, 1.184, 0.98, 0.97)
    stream = io.StringIO()
    Console(file=stream, width=width).print(demo.epoch_table([row], width))
    head, rule, cells = stream.getvalue().splitlines()
    assert len(head.split()) == len(cells.replace(" %", "%").split())
    assert "…" not in head + cells
    assert len(rule) <= width
    assert ("evicted" in head, "new" in head) == (width >= 79, width >= 61)


def test_what_goes_on_has_a_line_of_its_own() -> None:
    screen = demo.DemoScreen(Console(file=io.StringIO(), width=50), Path("cache"))
    screen.rows = [
        demo.EpochRow(i, 1456, 432, 4880, 3424, 0.03, 1.184, 0.98, 0.97) for i in range(9)
    ]
    for height in (19, 29):
        lines = screen.console.render_lines(screen.picture("epoch 10: " + 9 * "long ", height))
        assert len(lines) <= height
        assert "".join(segment.text for segment in lines[-1]).endswith("…")


@pytest.mark.torch
def test_the_model_learns_while_the_cache_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(demo, "SAMPLES_PER_SECOND", 1500)  # no person watches
    console = Console(file=io.StringIO(), width=100)
    rows = demo.run_demo(console, epochs=7, keep=tmp_path)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [row.number for row in rows] == list(range(1, 8))
    assert rows[-1].cached > rows[0].cached
    assert rows[-1].held_out > max(0.6, rows[0].held_out + 0.15)
    assert rows[-1].loss < rows[0].loss
    assert rows[-1].drawn > rows[0].drawn
    assert "held-out" in text
    assert (tmp_path / "remote").is_dir()


@pytest.mark.slow
def test_without_pytorch_the_cache_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(demo, "LAST_EPOCH_STARTS_SECONDS", 8.0)
    console = Console(file=io.StringIO(), width=200)
    assert demo.run_demo(console, epochs=3, keep=tmp_path) == []
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "pip install 'growcache[torch]'" in text
    assert " samples were drawn" in text
    assert "\n0 samples were drawn" not in text
