"""How a process of the command line ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
{imports}
import growcache.__main__ as entry

class Whole:
    def __del__(self):
        print("taken apart", flush=True)

whole = Whole()
sys.argv = ["growcache", *{arguments}]
entry.main()
"""


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["peek", "/nowhere/at/all"], 2)]
)
def test_python_is_not_taken_apart_under_the_threads_of_obstore(
    arguments: list[str], code: int
) -> None:
    script = SCRIPT.format(imports="import obstore", arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, "taken apart" in ended.stdout) == (code, False), ended
    assert ended.stdout or ended.stderr  # what was said is not lost


def test_other_processes_end_as_any() -> None:
    script = SCRIPT.format(imports="", arguments=["--version"])
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, "taken apart" in ended.stdout) == (0, True), ended
