"""What ``peek`` shows to people: samples of any kind, at any width."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from growcache.cli import peek
from growcache.cli.cli import main
from growcache.schema import Sample, Schema
from tests.filled import Filled

JPEG = b"\xff\xd8\xff\xe0" + bytes(3000)
SCHEMA = Schema.declared(
    {
        "label": ["int64"],
        "photo": "bytes",
        "note": "str",
        "waves": ["float32", None, 3],
        "none": ["float32", 0, 2],
        "yes": ["bool"],
    }
)
Show = Callable[..., str]


def mixed(name: int) -> Sample:
    """Every kind of field, ragged ones too."""
    return {
        "label": np.array(12345 + name),
        "photo": JPEG,
        "note": f"escape \x1b[31m {'and long ' * 5}",
        "waves": np.arange(3 * (1 + name % 2), dtype="<f4").reshape(-1, 3),
        "none": np.zeros((0, 2), "<f4"),
        "yes": np.array(True),
    }


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Shows what ``peek`` prints at a terminal of that width."""
    with Filled(tmp_path / "cache", mixed, schema=SCHEMA) as made:
        made.add(0, 1, samples=3)

    def shown(width: int, *options: str) -> str:
        stream = io.StringIO()
        monkeypatch.setattr(peek, "Console", lambda: Console(file=stream, width=width))
        assert main(["peek", str(made.root), *options]) == 0
        return stream.getvalue()

    return shown


def test_a_wide_terminal_gets_a_table(show: Show) -> None:
    text = show(160)
    assert "waves: shape, min, mean, max" in text
    (row,) = (line for line in text.splitlines() if "1:0" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [
        "1:0",
        "object-1-0 [0:1]",
        "13345",
        "-",
        r"escape \x1b[31m and long…",
        "JPEG, 3.00 kB",
        "[1, 3] 0 1 2",
        "True",
    ]


def test_a_narrow_terminal_gets_a_list(show: Show) -> None:
    text = show(60)
    assert "│" not in text
    assert "1:0  object-1-0 [0:1]\n  label  13345\n  none   [0, 2]\n" in text
    assert "  photo  JPEG, 3.00 kB\n  waves  [1, 3], 0 to 2, mean 1\n  yes    True\n" in text


def test_one_sample_is_shown_with_what_is_in_it(show: Show) -> None:
    text = show(60, "--sample", "0:1")
    assert text.startswith("sample 0:1\nfrom   object-0-1 [1:2]\n")
    assert "photo: JPEG, 3.00 kB\n  b'\\xff\\xd8\\xff\\xe0" in text
    assert "note: 58 characters\n" in text
    assert "waves: float32[2, 3], 0 to 5, mean 2.5\n  [[0. 1. 2.]\n   [3. 4. 5.]]" in text
    assert "label: int64\n  12346\n" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("keys", "folder"),
    [
        (["a/b/1", "a/b/2"], "a/b/"),
        (["a/b/1", "a/b/12"], "a/b/"),
        (["a/b", "a/b/1"], "a/"),
        (["1", "2"], ""),
        (["/1", "/2"], "/"),
        (["a/1", "a/1"], ""),
    ],
)
def test_what_all_origins_share_is_said_once(keys: list[str], folder: str) -> None:
    assert peek.common_folder(keys) == folder
