"""Error codes: each is explained, raised, and keeps its meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import get_args

import pytest

from growcache.cli.cli import main
from growcache.cli.explain import PARTS, areas, explanations, reference_page
from growcache.errors import ConfigError, ErrorCode
from growcache.secrecy import HIDDEN, remember_secrets
from tests.cli.terminals import ROOT
from tests.tables import DOCS

PAGE = DOCS / "reference/errors.md"
# Every code that was ever released, and its title.
KNOWN = ROOT / "tests" / "golden" / "error_codes.json"


def codes_in_source() -> Iterator[str]:
    """The codes of classes, and those of the places that raise another one."""
    for path in (ROOT / "growcache").rglob("*.py"):
        yield from re.findall(r'\bcode(?:: ErrorCode = |=)"(\w+)"', path.read_text("utf-8"))


def test_each_code_is_raised_and_explained() -> None:
    codes = get_args(ErrorCode)
    assert list(explanations()) == list(codes)
    assert set(codes_in_source()) == set(codes)


def test_each_explanation_has_its_parts_in_order() -> None:
    for one in explanations().values():
        places = [one.body.find(part) for part in PARTS]
        assert 0 < places[0] < places[1] < places[2], one.code
    for number, area in enumerate(areas(), start=1):
        assert {one.code[2] for one in area.explanations} == {str(number)}


def test_a_code_keeps_its_title(write_tables: bool) -> None:
    """A retired code stays; a new title for the same meaning is a deliberate change of the file."""
    titles = {one.code: one.title for one in explanations().values()}
    if write_tables:
        KNOWN.write_text(json.dumps(titles, indent=1) + "\n", encoding="utf-8")
    assert json.loads(KNOWN.read_text(encoding="utf-8")) == titles


def test_the_page_is_that_of_the_package(write_tables: bool) -> None:
    if write_tables:
        PAGE.write_text(reference_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == reference_page()


@pytest.mark.parametrize("typed", ["GC401", "gc401", "401", "(GC401;"])
def test_explain_prints_one(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", typed]) == 0
    said = capsys.readouterr().out
    assert said.startswith("## GC401: There is no cache at the path\n")
    assert all(part in said for part in PARTS)


def test_explain_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {one.code}  {one.title}\n" in said for one in explanations().values())


def test_a_message_ends_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "GC000"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("(GC105; growcache explain GC105)")
    remember_secrets({"storage_options": {"secret": "hunter2hunter2"}})
    error = ConfigError("no such key hunter2hunter2", code="GC204")
    assert (str(error), error.code) == (f"no such key {HIDDEN}", "GC204")
    assert error.__notes__ == ["(GC204; growcache explain GC204)"]
