"""`loader.metrics()` in the trackers of experiments, by the lines of docs/guides/epochs.md, and Lightning's callback.

They are run as jobs of their own: they warn when they are imported, which the suite forbids.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from growcache.errors import MissingLibraryError
from growcache.loading.report import Report
from tests.filled import Filled
from tests.loading.conftest import full_of

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("track_with.py")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with Filled(tmp_path / "cache", full_of((4,))) as filled:
        filled.add(*range(10))
        yield filled.root


def kept_by(tracker: str, cache: Path, out: Path) -> Any:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"needs {tracker}")
    out.mkdir()
    done = subprocess.run(
        [sys.executable, PROGRAM, tracker, cache, out],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent.parent), *sys.path]),
            "WANDB_SILENT": "true",
            "MLFLOW_ALLOW_FILE_STORE": "true",  # a database needs all of MLflow
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("KEPT")[2])


@pytest.mark.slow
@pytest.mark.torch
def test_tensorboard_reads_back_each_epoch(cache: Path, tmp_path: Path) -> None:
    found = kept_by("tensorboard", cache, tmp_path / "out")
    assert [step for step, _ in found["data/reuse"]] == [25, 50, 75]
    assert [value for _, value in found["data/reuse"]] == [1.0, 2.0, 3.0]
    assert set(found) >= {"data/samples", "data/ess_samples", "data/wait_seconds"}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_other_trackers_keep_the_last_epoch(tracker: str, cache: Path, tmp_path: Path) -> None:
    found = kept_by(tracker, cache, tmp_path / "out")
    assert (found["data/reuse"], found["data/cache_samples"]) == (3.0, 100.0)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_callback_logs_epochs_and_steps(package: str, cache: Path, tmp_path: Path) -> None:
    rows = kept_by(package, cache, tmp_path / "out")
    assert [int(row["step"]) for row in rows] == [4, 8, 10, 14, 18, 20, 24, 28, 30]
    samples = [float(row["data/samples"]) for row in rows]
    assert samples == [16, 32, 40] * 3


def test_a_report_is_a_table_in_a_notebook_and_text_stays_text() -> None:
    hostile = "<script>alert(1)</script>"
    found = Report(samples=6400, reuse=1.5, limited_by=hostile, fingerprint=hostile)
    table = found._repr_html_()
    assert "<td style='text-align:right'>6,400</td>" in table
    assert "<td style='text-align:right'>unknown</td>" in table
    assert "<script" not in table
    assert "&lt;script&gt;" in table


def test_the_table_of_a_report_begins_with_what_needs_a_person() -> None:
    table = Report(
        skipped=3, reuse_recent=5.0, limited_by="cache", wait_seconds=9
    )._repr_html_()
    places = [
        table.index(text) for text in ("3 samples of damaged", "5.0 times", "waited 9.0 s")
    ]
    assert sorted(places) == places
    assert places[-1] < table.index("<th")
    assert "⚠" not in Report()._repr_html_()


@pytest.mark.torch
def test_the_front_door_needs_no_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    import growcache.torch

    for name in (*sys.modules,):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "growcache.torch.lightning", raising=False)
    assert "LightningMetrics" in dir(growcache.torch)
    assert "LightningMetrics" not in growcache.torch.__all__
    with pytest.raises(MissingLibraryError, match="pip install lightning"):
        _ = growcache.torch.LightningMetrics
