"""``python -m tests.matrix``: run every case and write the table of docs/reference/matrix.md."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path

from tests.matrix.case import Case, Finding
from tests.matrix.cases_refused import READER
from tests.matrix.registry import all_cases, run_case_number

PAGE = Path(__file__).parents[2] / "docs" / "reference/matrix.md"
PROCESSES = 2
HEAD = """# What libraries write

This page lists files of common libraries, and the sample that growcache makes of each. `python -m tests.matrix` wrote
it: {count} cases.

In each case a library writes a few files, and a service caches all of their samples. Each sample equals the data that
the library reads at its origin, by value and dtype. A result has the number of samples and their fields, or *refused*
and the advice of the error.
"""


def main() -> int:
    runnable = [number for number, case in enumerate(all_cases()) if _can_run(case)]
    # Spawned, because libraries hold locks and threads that a fork would copy.
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(run_case_number, runnable))
    findings = [
        (all_cases()[number], finding) for number, finding in zip(runnable, found, strict=True)
    ]
    for case, finding in findings:
        for problem in finding.problems:
            print(f"{case.name}: {problem}")
    PAGE.write_text(_page(findings), encoding="utf-8")
    return int(any(finding.problems for _, finding in findings))


def _can_run(case: Case) -> bool:
    missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped, because {', '.join(missing)} is not installed: {case.name}")
    return not missing


def _page(findings: list[tuple[Case, Finding]]) -> str:
    lines = [HEAD.format(count=len(findings))]
    by_format = sorted(findings, key=lambda found: _heading(found[0]))
    for heading, group in groupby(by_format, lambda found: _heading(found[0])):
        lines += [
            f"## {heading}\n",
            "| written by | holds | options | result |",
            "| --- | --- | --- | --- |",
        ]
        lines += [_row(case, finding) for case, finding in group]
        lines.append("")
    return "\n".join(lines)


def _heading(case: Case) -> str:
    return "your own function" if case.format == READER else case.format


def _row(case: Case, finding: Finding) -> str:
    options = f"`{json.dumps(case.options)}`" if case.options else ""
    result = (
        "; ".join(("**wrong**", *finding.problems[:1])) if finding.problems else finding.result
    )
    return f"| {case.writer} | {case.holds} | {options} | {result} |".replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
