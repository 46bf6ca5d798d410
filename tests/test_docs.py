"""What the documentation says is true: commands, code, configs, links."""

import os
import re
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import typer.main

from growcache import Snapshot
from growcache.cli.cli import app, main
from growcache.config_text import load_config
from growcache.formats import open_source
from tests.tables import DOCS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
OWN_CODE = DOCS / "guides/own_code.md"
LABELS = DOCS / "guides/joining.md"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
COMMANDS_PAGE = (DOCS / "reference/commands.md").read_text(encoding="utf-8")
DATA = (DOCS / "start/your_data.md").read_text(encoding="utf-8")
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"## growcache {command}\n" in COMMANDS_PAGE
    assert main([command, "--help"]) == 0
    assert f"Example: growcache {command}" in " ".join(capsys.readouterr().out.split())


def test_every_command_in_the_documentation_exists() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = set(re.findall(r"`growcache ([a-z]+)", text))
    assert found <= set(COMMANDS)


def test_the_shell_blocks_name_targets_and_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) >= 4
    for line in lines:
        last = line.split("&&")[-1].split()
        if last[0] == "make":
            assert last[1] in targets
        elif last[:2] == ["pip", "install"]:
            extras = re.findall(r"\w+", last[2])
            assert set(extras) <= set(
                metadata.metadata("growcache").get_all("Provides-Extra", [])
            )
        else:
            assert last[:2] == ["growcache", last[1]]
            assert last[1] in COMMANDS


def test_the_python_blocks_run_on_a_real_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks for PyTorch, as they stand, but for two epochs instead of 90."""
    pytest.importorskip("torch")
    (tmp_path / "data").mkdir()
    for i in range(80):
        np.save(tmp_path / "data" / f"{i:02d}.npy", np.full((8, 8), i, "<f4"))
    url = f"{tmp_path}/data/*.npy"
    states = "".join(f"{i:02d}.npy,s{i % 4},{'rest' if i % 2 else 'task'}\n" for i in range(80))
    (tmp_path / "labels.csv").write_text("path,subject,state\n" + states)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "growcache.yaml", "--url", url]) == 0
    monkeypatch.setenv("GROWCACHE_CACHE__MAX_BYTES", "20MB")
    labels = "{url: labels.csv, key: path, columns: [state], classes: auto}"
    written = (
        (tmp_path / "growcache.yaml").read_text().replace("labels: null", f"labels: {labels}")
    )
    (tmp_path / "growcache.yaml").write_text(written)
    train, serve, _ = blocks("python")
    (classes,) = blocks("python", LABELS)
    loop = train.replace("range(90)", "range(2)") + "\nloader.close()\nimport torch\n"
    loop += classes + "\nloader.close()\nassert loss < 1e6\n"
    loop = loop.replace("batch_size=64", "batch_size=16")
    body = "\n".join("    " + line for line in loop.splitlines())
    script = serve.replace("    ...  # the loop above", body)
    assert script != serve
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"samples \(\d+ new\)", done.stdout)) == 2


def test_the_transform_of_the_guide_labels_by_folder() -> None:
    names: dict[str, object] = {"np": np}
    exec(blocks("python", OWN_CODE)[1], names)
    origin = type("Origin", (), {"key": "study/patient/7.npy"})
    assert names["label"]({"x": 0}, origin)["y"] == 1  # type: ignore[operator]


def test_the_format_of_the_guide_is_a_format(tmp_path: Path) -> None:
    (tmp_path / "formats.py").write_text(blocks("python", OWN_CODE)[0])
    (tmp_path / "data").mkdir()
    for i in range(6):
        np.savez(tmp_path / "data" / f"{i}.npz", x=np.full(4, i, "<f4"), y=np.int64(i))
    done = subprocess.run(
        [sys.executable, "-m", "growcache", "run", "--until-full", write_read_config(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    with Snapshot.take(tmp_path / "cache") as snapshot:
        samples = [snapshot[i] for i in range(len(snapshot))]
    assert sorted(int(sample["y"]) for sample in samples) == list(range(6))
    assert all((sample["x"] == sample["y"]).all() for sample in samples)


def write_read_config(folder: Path) -> str:
    (folder / "c.yaml").write_text(
        "source: {url: data/*.npz, format: 'formats:read'}\ncache: {max_bytes: 20MB}\n"
    )
    return "c.yaml"


def test_the_tensorflow_block_compiles() -> None:
    compile(blocks("python")[-1], str(README), "exec")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_is_linked(path: Path) -> None:
    config = load_config(path)
    for source in config.sources:
        open_source(source)
    assert f"configs/{path.name}" in DATA


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_link_leads_nowhere(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            if page.is_relative_to(DOCS) and file.suffix == ".md":
                assert file.resolve().is_relative_to(DOCS), f"{target} is no page of the site"
            if anchor:
                assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub does it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_column_has_a_heading(page: Path) -> None:
    heads = re.findall(r"^ *(\|.*\|)\n *\|[ :|-]+\|$", page.read_text("utf-8"), re.M)
    assert not [head for head in heads if re.search(r"\|\s*\|", head)]


def test_every_page_is_in_the_navigation_once() -> None:
    found = Counter(page for index in DOCS.rglob("*.md") for page in toctree(index))
    pages = {page for suffix in ("md", "ipynb") for page in DOCS.rglob(f"*.{suffix}")}
    assert found == Counter(pages - {DOCS / "index.md"})


def toctree(index: Path) -> set[Path]:
    """The pages that stand below another in the navigation."""
    named = re.findall(r"^```\{toctree\}\n((?:.*\n)*?)^```", index.read_text("utf-8"), re.M)
    entries = [line.split("<")[-1].rstrip(">") for block in named for line in block.split("\n")]
    patterns = [entry for entry in entries if entry and not entry.startswith(":")]
    found = {
        page.resolve()
        for pattern in patterns
        for suffix in ("md", "ipynb")
        for page in index.parent.glob(f"{pattern}.{suffix}")
    }
    return found - {index}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names files that have gone
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", page.read_text(encoding="utf-8")):
        places = [ROOT / name, ROOT / "growcache" / name]
        assert any(place.exists() for place in places), f"{page.name} names {name}"


def test_the_glossary_has_at_most_sixty_words_each_once() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    words = [word for word in re.findall(r"^\| ([^|]+) \|", text, re.M) if word != "word"]
    words = [word for word in words if not word.startswith("---")]
    assert len(words) == len(set(words))
    assert len(words) <= 60


def test_the_examples_are_linked() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in DATA
