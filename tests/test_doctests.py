"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^ +>>> ", re.MULTILINE)


def modules_with_examples() -> list[str]:
    files = [
        file for room in ("growcache", "tools", "tests") for file in (ROOT / room).rglob("*.py")
    ]
    found = [file.relative_to(ROOT) for file in files if EXAMPLE.search(file.read_text())]
    return sorted(
        ".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in found
    )


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_do_what_they_show(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert (failed, tried > 0) == (0, True)
