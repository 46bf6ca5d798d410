"""A sampler stays below 200 MB on files that lie, whatever their format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.hostile_memory import FAMILIES, MOST_MB, run_family


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_memory_of_a_sampler(name: str, tmp_path: Path) -> None:
    found = run_family(FAMILIES[name](), tmp_path)
    assert 0 < found.megabytes < MOST_MB, (found.megabytes, found.said)
