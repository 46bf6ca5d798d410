"""Every rule has a mutation that fits the source of today; `make mutants` runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant
from tests.mutants.__main__ import main
from tests.mutants.collecting import read
from tests.mutants.editing import edited


def test_every_rule_has_a_mutation_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mutants", "--list"])
    code = main()
    assert code == 0, capsys.readouterr().out


def test_markers_are_found_where_tests_have_them() -> None:
    marker = "@pytest.mark.mutant(3, 'growcache.x:f', 'a' 'b', '')\n"
    text = f"{marker}def test_x(): ...\nclass TestY:\n    {marker}    def test_z(self): ...\n"
    names = [mutant.test for mutant in read(text, ROOT / "tests/test_y.py")]
    assert names == ["tests/test_y.py::test_x", "tests/test_y.py::TestY::test_z"]
    with pytest.raises(ValueError, match=r"test_y\.py:1: expected the marker"):
        list(read(f"all_of_them = {marker.strip()[1:]}", ROOT / "tests/test_y.py"))


SOURCE = '''"""A module; def lone(): ..."""

LIMIT: int = 3
QUERY = (
    "SELECT seq "  # é
    "FROM shards"
)


@decorated
def count(rows, *, daemon=False):
    """Return rows + 1."""

    def inner():
        return rows + 2  # more

    if rows:
        start(
            rows,
            daemon=True,
        )
    elif (
        LIMIT  # at most
        and rows
    ):
        stop("é", rows); pause()
    try:
        go()
    except (OSError, ValueError):
        raise
    return inner()


class Shard:
    @property
    def name(self):
        return self.number

    @name.setter
    def name(self, value):
        self.number = value
'''


@pytest.mark.parametrize(
    ("qualname", "old", "new", "before", "after"),
    [
        pytest.param("LIMIT", "3", "4", "int = 3", "int = (4)", id="constant"),
        pytest.param(
            "QUERY",
            "'SELECT seq FROM shards'",
            "'SELECT 1'",
            '"SELECT seq "  # é\n    "FROM shards"',
            "('SELECT 1'\n    )",
            id="string of two parts",
        ),
        pytest.param("count", "rows + 2", "a or b", "rows + 2", "(a or b)", id="expression"),
        pytest.param(
            "count",
            "LIMIT and rows",
            "rows",
            "LIMIT  # at most\n        and rows",
            "(rows\n        )",
            id="expression of two lines",
        ),
        pytest.param(
            "count", "daemon=True", "daemon=1", "daemon=True", "daemon=1", id="keyword"
        ),
        pytest.param("count", "decorated", "other", "@decorated", "@(other)", id="decorator"),
        pytest.param(
            "count",
            "(OSError, ValueError)",
            "()",
            "(OSError, ValueError)",
            "(())",
            id="except clause",
        ),
        pytest.param("count", "pause()", "", " pause()", " ", id="one of two statements"),
        pytest.param(
            "count.inner",
            "return rows + 2",
            "",
            "return rows + 2",
            "pass",
            id="only statement of a nested function",
        ),
        pytest.param(
            "count",
            "start(rows, daemon=True)",
            "",
            "start(\n            rows,\n            daemon=True,\n        )",
            "pass\n\n\n",
            id="statement of four lines",
        ),
        pytest.param(
            "count",
            "go()",
            "if ready:\n    go()\n    rest()",
            "        go()",
            "        if ready:\n            go()\n            rest()",
            id="block, indented",
        ),
        pytest.param(
            "Shard", "return self.number", "", "return self.number", "pass", id="class"
        ),
        pytest.param(
            "Shard.name",
            "self.number = value",
            "raise",
            "self.number = value",
            "raise",
            id="setter of a property",
        ),
    ],
)
def test_only_the_piece_is_replaced(
    qualname: str, old: str, new: str, before: str, after: str
) -> None:
    assert SOURCE.count(before) == 1
    assert edited(SOURCE, qualname, old, new) == SOURCE.replace(before, after)


def test_two_statements_change_places() -> None:
    source = """
class A:
    def f(self):
        a()  # first

        b(
            1,
        )  # second
        c()
"""
    changed = """
class A:
    def f(self):
        b(1)
        a()


  # second
        c()
"""
    assert edited(source, "A.f", "a()\nb(1)", "b(1)\na()") == changed


def test_a_function_is_replaced_with_its_decorators_and_docstring() -> None:
    source = """
def f():
    @cached
    def g():
        'Say it.'
        return 1
    return g
"""
    changed = """
def f():
    g = None



    return g
"""
    assert edited(source, "f", "@cached\ndef g():\n    return 1", "g = None") == changed


@pytest.mark.parametrize(
    ("symbol", "old", "new", "error"),
    [
        ("x:count", "rows + 1", "1", "expected 'rows + 1' once in count, found it 0 times"),
        ("x:count", "rows", "1", "expected 'rows' once in count, found it 5 times"),
        ("x:count.outer", "1", "2", "there is no count.outer in the module"),
        ("x:lone", "1", "2", "there is no lone in the module"),
        ("y:count", "1", "2", "there is no module y"),
        ("x:count", "if rows:", "", "'if rows:' is no expression or statement"),
        ("x:count", "# rows", "", "there is nothing to look for: the old piece is empty"),
        ("x:count", "pause()", "go()\nrest()", "'go()\\nrest()' cannot replace 'pause()' in"),
    ],
)
def test_a_marker_that_does_not_fit_is_named(
    tmp_path: Path, symbol: str, old: str, new: str, error: str
) -> None:
    (tmp_path / "x.py").write_text(SOURCE, encoding="utf-8")
    mutant = Mutant(7, symbol, old, new, "tests/test_x.py::test_x")
    with pytest.raises(ValueError, match="change the marker on tests/test_x") as said:
        mutant.source(tmp_path)
    assert str(said.value).startswith(f"rule 7, {symbol}: {error}")


def test_a_piece_that_would_end_an_elif_is_refused() -> None:
    source = "def f():\n    if a:\n        b()\n    elif c:\n        d()\n"
    with pytest.raises(ValueError, match="cannot replace"):
        edited(source, "f", "if c:\n    d()", "if e:\n    d()")
