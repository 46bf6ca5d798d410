"""`python -m tests.mutants [--list] [RULE …]`: break each rule, and see that its test notices."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import ROOT, RULES, Mutant
from tests.mutants.collecting import collect

COPIED = ("growcache", "tests", "benchmarks", "examples", "configs", "docs")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*")
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that the test did not run
SECONDS = 300.0


@dataclass(frozen=True)
class Verdict:
    """What one test said, without and with the mutation."""

    mutant: Mutant
    sound: int
    broken: int
    seconds: float
    said: str

    @property
    def killed(self) -> bool:
        """Whether the test passes, and fails under the mutation."""
        return (self.sound, self.broken) == (PASSED, FAILED)

    def __str__(self) -> str:
        word = "noticed" if self.killed else "NOT NOTICED"
        if self.sound != PASSED:
            word = "NO TEST: it fails without the mutation, too"
        elif self.broken not in (PASSED, FAILED):
            word = f"NO TEST: pytest ended with {self.broken} under the mutation"
        where = f"{self.mutant.symbol}  {self.mutant.test}"
        return f"rule {self.mutant.rule:2}  {word:12} {self.seconds:5.1f} s  {where}"


def main() -> int:
    """Run the mutants of the rules that are named, or all; return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--list", action="store_true", help="only see that they fit the source"
    )
    arguments.add_argument("rules", nargs="*", type=int, metavar="RULE", help="default: all")
    given = arguments.parse_args()
    wanted = set(given.rules) or set(RULES)
    mutants = [mutant for mutant in collect() if mutant.rule in wanted]
    return _list(mutants, wanted) if given.list else _run_all(mutants, wanted)


def _list(mutants: list[Mutant], wanted: set[int]) -> int:
    for mutant in mutants:
        mutant.source()
        print(f"rule {mutant.rule:2}  {mutant.symbol}  {mutant.test}")
    missing = sorted(wanted - {mutant.rule for mutant in mutants})
    for rule in missing:
        print(f"rule {rule:2}  has no mutation: {RULES[rule]}")
    return 1 if missing else 0


def _run_all(mutants: list[Mutant], wanted: set[int]) -> int:
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        verdicts = []
        for verdict in pool.map(_judge, mutants):
            verdicts.append(verdict)
            print(verdict, flush=True)
            if not verdict.killed:
                print(verdict.said)
    noticed = {v.mutant.rule for v in verdicts} - {
        v.mutant.rule for v in verdicts if not v.killed
    }
    for rule in sorted(wanted - noticed):
        print(f"rule {rule:2}  not shown: {RULES[rule]}")
    killed = sum(verdict.killed for verdict in verdicts)
    print(
        f"{len(noticed)} of {len(wanted)} rules: breaking them is noticed "
        f"({killed} of {len(verdicts)} mutations)"
    )
    return 0 if noticed == wanted and killed == len(verdicts) else 1


def _judge(mutant: Mutant) -> Verdict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        _copy(root)
        sound, said = _run(root, mutant.test)
        broken = -1
        if sound == PASSED:
            mutant.file(root).write_text(mutant.source(), encoding="utf-8")
            broken, said = _run(root, mutant.test)
    return Verdict(mutant, sound, broken, time.monotonic() - began, said)


def _copy(root: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=LEFT_OUT)
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, root / name)


def _run(root: Path, test: str) -> tuple[int, str]:
    """Run the test in the copy; return pytest's exit code and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:randomly", test],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "HYPOTHESIS_STORAGE_DIRECTORY": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout[-3000:] + done.stderr[-1000:]


if __name__ == "__main__":
    sys.exit(main())
