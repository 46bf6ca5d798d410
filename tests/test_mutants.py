"""Every rule has a mutation that fits the source of today; `make mutants` runs them."""

from __future__ import annotations

import pytest

from tests.mutants import ROOT
from tests.mutants.__main__ import main
from tests.mutants.collecting import read


def test_every_rule_has_a_mutation_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mutants", "--list"])
    code = main()
    assert code == 0, capsys.readouterr().out


def test_markers_are_found_where_tests_have_them() -> None:
    marker = "@pytest.mark.mutant(3, 'growcache/x.py', 'a' 'b', '')\n"
    text = f"{marker}def test_x(): ...\nclass TestY:\n    {marker}    def test_z(self): ...\n"
    names = [mutant.test for mutant in read(text, ROOT / "tests/test_y.py")]
    assert names == ["tests/test_y.py::test_x", "tests/test_y.py::TestY::test_z"]
    with pytest.raises(ValueError, match=r"test_y\.py:1: expected the marker"):
        list(read(f"all_of_them = {marker.strip()[1:]}", ROOT / "tests/test_y.py"))
