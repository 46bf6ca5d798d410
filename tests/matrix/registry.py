"""All cases of the matrix, by the modules that hold them."""

from __future__ import annotations

import pkgutil
import tempfile
from importlib import import_module
from pathlib import Path

import tests.matrix
from tests.matrix.case import Case, Finding, run_case


def all_cases() -> list[Case]:
    names = sorted(module.name for module in pkgutil.iter_modules(tests.matrix.__path__))
    modules = [import_module(f"tests.matrix.{name}") for name in names if name[:6] == "cases_"]
    return [case for module in modules for case in module.CASES]


def run_case_number(number: int) -> Finding:
    """Run one of all cases, in a process that a pool has started."""
    with tempfile.TemporaryDirectory() as folder:
        return run_case(all_cases()[number], Path(folder))
