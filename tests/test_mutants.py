"""Every rule has a mutation that fits the source of today; `make mutants` runs them."""

from __future__ import annotations

import subprocess
import sys

from tests.mutants import ROOT


def test_every_rule_has_a_mutation_that_fits() -> None:
    # In a process of its own: pytest inside pytest would share its plugins and warnings.
    command = [sys.executable, "-m", "tests.mutants", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
