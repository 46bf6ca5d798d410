"""What samplers print while the picture is shown."""

from pathlib import Path

import numpy as np

from tests.cli.terminals import terminal

TALKATIVE = """
import warnings

def talk(sample, origin):
    print("reading", origin.key.rpartition("/")[2])
    warnings.warn("a warning of mine")
    return sample
"""


def test_what_samplers_print_stands_above_the_picture(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(12):
        np.save(tmp_path / "data" / f"{i}.npy", np.full((8, 8), i, "<f4"))
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    (tmp_path / "growcache.yaml").write_text(
        "source: {url: 'data/*.npy'}\n"
        "sampling: {transform: 'talkative:talk'}\n"
        "cache: {path: cache, max_bytes: 20MB}\n"
    )
    with terminal(
        "run", "growcache.yaml", "--until-full", columns=100, rows=40, cwd=tmp_path
    ) as seen:
        assert seen.end() == 0
        above, _, picture = seen.text.rpartition("╭─")
    for i in range(12):
        assert f"reading {i}.npy\r\n" in above
    assert "UserWarning: a warning of mine" in above
    assert "reading" not in picture.replace("0 reading", "").replace("1 reading", "")
    assert "everything is cached" in picture


def test_an_error_at_the_end_comes_after_the_picture(tmp_path: Path) -> None:
    (tmp_path / "growcache.yaml").write_text(
        "source: {url: 'none/*.npy'}\ncache: {path: cache, max_bytes: 20MB}\n"
    )
    with terminal("run", "growcache.yaml", cwd=tmp_path) as seen:
        assert seen.end() == 2
        assert "growcache: " in seen.text[seen.text.rindex("╯") :]
