"""The notebooks of docs/tutorials: short, without outputs, and each trains what it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from growcache.cli.cli import main

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CHANCE = {"eeg_windows": 1 / 2, "images_from_a_bucket": 1 / 3, "your_own_dataset": 1 / 2}
NEEDS = {
    "eeg_windows": ["edfio", "matplotlib", "torch"],
    "images_from_a_bucket": ["PIL", "boto3", "matplotlib", "moto.server", "torch"],
    "your_own_dataset": ["torch"],
}
SKIPPED = "skip-execution"

# What a training that learnt leaves behind, appended to the notebook.
CHECK = """
best = max(accuracies)
assert best > {chance} + 0.25, accuracies
assert accuracies[-1] > accuracies[0], accuracies
"""


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_has_no_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_of(notebook)
    assert 8 <= len(cells) <= 15
    for cell in cells:
        assert cell.outputs == []
        assert cell.execution_count is None
        assert cell.source.count("\n") < 32, cell.source
        if SKIPPED not in cell.metadata.get("tags", []):
            compile(cell.source, path.name, "exec")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(path: Path) -> None:
    links = links_of(path)
    assert len(links) >= 3
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_demo_writes_copies_whose_links_lead_somewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = tmp_path / "copies"
    assert main(["demo", "--notebook", "--keep", str(copies)]) == 0
    assert str(copies / "eeg_windows.ipynb") in capsys.readouterr().out
    written = sorted(copies.iterdir())
    assert [path.name for path in written] == [path.name for path in NOTEBOOKS]
    for copy, path in zip(written, NOTEBOOKS, strict=True):
        assert code_of(read(copy)) == code_of(read(path))
        assert [link for link in links_of(copy) if not (copies / link).exists()] == []
    assert main(["demo", "--notebook", "--keep", str(copies)]) == 2


def test_the_package_brings_all_of_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    homes = {f"docs/tutorials/{path.name}": path.name for path in NOTEBOOKS}
    assert included == {home: f"growcache/tutorials/{name}" for home, name in homes.items()}


def links_of(path: Path) -> list[str]:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    return [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all notebooks, because `growcache demo --notebook` writes them into one."""
    return tmp_path_factory.mktemp("tutorials")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the notebook's own machinery
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_trains_a_model_that_learns(
    path: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDS[path.stem]:
        pytest.importorskip(package)
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = read(path)
    check = CHECK.format(chance=CHANCE[path.stem])
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        skip_cells_with_tag=SKIPPED,
        resources={"metadata": {"path": str(shared_folder)}},
    ).execute()
