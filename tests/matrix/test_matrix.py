"""Every sample that a cache holds of a library's file is what the library reads there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.matrix.case import Case, run_case
from tests.matrix.registry import all_cases

CASES = all_cases()


def test_every_case_has_a_name_of_its_own() -> None:
    assert [
        name for name, count in Counter(case.name for case in CASES).items() if count > 1
    ] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that write
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cache_holds_what_the_library_reads(case: Case, tmp_path: Path) -> None:
    for module in case.needs:
        pytest.importorskip(module)
    assert run_case(case, tmp_path).problems == ()
