"""Finding the mutants: pytest collects the tests, their markers tell."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.mutants import ROOT, Mutant


class _Markers:
    def __init__(self) -> None:
        self.found: dict[Mutant, None] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for marker in item.iter_markers("mutant"):
                rule, file, old, new = marker.args
                test = item.nodeid.partition("[")[0]  # whatever its parameters
                self.found[Mutant(rule, file, old, new, test)] = None


def collect() -> list[Mutant]:
    """Return all mutants in the order of their rules.

    Raises:
        RuntimeError: the tests cannot be collected.
    """
    markers = _Markers()
    arguments = ["--collect-only", "-qq", "--no-summary", "-n0", "-p", "no:randomly"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*arguments, str(ROOT / "tests")], plugins=[markers])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest cannot collect the tests:\n{said.getvalue()}")
    return sorted(markers.found, key=lambda mutant: (mutant.rule, mutant.test))
