"""The picture during a training loop: in a real notebook, at a terminal, in a log."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import growcache
from growcache.cache.status_model import Status
from growcache.cli.watch import notebook_picture
from tests.cli.terminals import ROOT
from tests.filled import Filled

CELL = """
import time
import growcache

with growcache.watch({cache!r}, seconds=0.05):
    for step in range(20):
        time.sleep(0.05)
        if step % 10 == 0:
            print("step", step)
"""


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with Filled(tmp_path / "cache") as made:
        made.add(0, 1, 2)
    return made.root


def execute(cell: str, folder: Path) -> list[dict[str, Any]]:
    """The outputs of one cell, executed by a kernel."""
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs: list[dict[str, Any]] = notebook.cells[0].outputs
    return outputs


@pytest.mark.filterwarnings("ignore")  # of the notebook's own machinery
def test_a_notebook_has_one_picture_however_often_it_is_drawn(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outputs = execute(CELL.format(cache=str(filled)), tmp_path)
    pictures = [output for output in outputs if output["output_type"] == "display_data"]
    printed = "".join(o["text"] for o in outputs if o["output_type"] == "stream")
    assert len(pictures) == 1
    assert printed == "step 0\nstep 10\n"
    data = pictures[0]["data"]
    assert "30" in data["text/html"]
    assert "cached in 3 shards" in data["text/html"]
    assert "growth" in data["text/plain"]  # it was drawn more than once


def test_a_picture_is_html_with_colours_and_plain_text() -> None:
    data = notebook_picture(
        Status(state="running", path="/<b>", samples=7, shards=1, max_bytes=100)
    )
    assert "color: #" in data["text/html"]
    assert "<b>" not in data["text/html"]
    assert "7 cached in 1 shard" in data["text/plain"]
    assert "\x1b" not in data["text/plain"]


def test_a_log_gets_lines_and_no_thread_is_left(filled: Path, tmp_path: Path) -> None:
    program = f"import growcache\nwith growcache.watch({str(filled)!r}): pass\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == ""
    assert done.stdout.startswith("stopped: no service runs on this cache")
    assert "30 samples in 3 shards" in done.stdout


def test_a_cache_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {*threading.enumerate()}
    shown = growcache.watch(tmp_path / "cache", seconds=0.01)
    with Filled(tmp_path / "cache") as made:
        made.add(0)
    shown.stop()
    shown.stop()
    assert not {*threading.enumerate()} - before
    assert "10 samples in 1 shard" in capsys.readouterr().out
