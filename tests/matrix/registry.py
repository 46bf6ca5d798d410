"""All cases of the matrix, by the modules that hold them."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import tests.matrix
from tests.matrix.case import Case


def all_cases() -> list[Case]:
    names = sorted(module.name for module in pkgutil.iter_modules(tests.matrix.__path__))
    modules = [import_module(f"tests.matrix.{name}") for name in names if name[:6] == "cases_"]
    return [case for module in modules for case in module.CASES]
