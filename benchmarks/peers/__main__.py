"""growcache compared with its peers, each in its best setting; writes docs/reference/loader_benchmarks.md.

`python -m benchmarks.peers` installs what it needs (about 5 GB), writes one kind of samples
at a time in every format (about 7 GB; removed again), and measures for three quarters of an
hour on two cores. In parts: `--only 256KiB --keep --directory D --results R`, as often as you
like, with `--stages write`, `--stages try` (of settings) or `--stages play`; rounds of the
same --results add up, and `--page` writes the page from them. `--quick` takes small data and
leaves the page alone.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import machine, parser
from benchmarks.peers.cases import FULL, Case, quick
from benchmarks.peers.environments import made
from benchmarks.peers.goals import goals
from benchmarks.peers.page import PAGE, about, number, write_page
from benchmarks.peers.picture import TARGET, draw
from benchmarks.peers.results import Results
from benchmarks.peers.roster import CONTESTANTS, Contestant, contestants, entrants
from benchmarks.peers.rounds import Match, Plan, running

ROOT = Path(__file__).parent.parent.parent
STAGES = ("write", "try", "play")
DEFAULT_ROUNDS, QUICK_ROUNDS = 5, 1


def arguments() -> ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--only", nargs="*", choices=list(FULL), help="samples to measure")
    made.add_argument("--contestants", nargs="*", choices=list(CONTESTANTS), metavar="NAME")
    made.add_argument("--environments", type=Path, metavar="DIR", help="where they are kept")
    made.add_argument("--results", type=Path, metavar="DIR", help="rounds of all runs so far")
    made.add_argument("--keep", action="store_true", help="leave the data for the next run")
    made.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES, metavar="STAGE")
    made.add_argument("--page", action="store_true", help="only write the page")
    return made


def main() -> int:
    given = arguments().parse_args()
    # A run that is ended removes its data, and what it measured is kept.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="peers-") as scratch:
        results = given.results or Path(scratch) / "results"
        writes = given.page or not (given.quick or given.only or given.contestants)
        if writes and not PAGE.exists():
            sys.exit(f"{PAGE} is not there: its text is kept in the repository")
        if not given.page:
            measure(given, Path(scratch), results)
        found = {case: r for case in FULL if (r := Results.read(results, case)).rounds}
        tell(found)
        if given.json is not None:
            given.json.write_text(json.dumps(summary(found), indent=1) + "\n", encoding="utf-8")
        if writes:
            write_page(found)
            draw(found)
            print(f"wrote {PAGE} and {TARGET}")
    return 0


def measure(given: Namespace, scratch: Path, results: Path) -> None:
    """Measure what was asked for, and keep the rounds."""
    chosen = contestants(given.contestants)
    environments = given.environments or scratch / "environments"
    pythons = {name: made(name, environments) for name in {c.environment for c in chosen}}
    rounds = given.rounds if given.rounds is not None else DEFAULT_ROUNDS
    plan = Plan(rounds)
    if given.quick:
        plan = Plan(given.rounds or QUICK_ROUNDS, 0.1, 0.05, 1, 0.1)
    for name in given.only or FULL:
        case = quick(FULL[name]) if given.quick else FULL[name]
        folder = (given.directory if given.keep and given.directory else scratch) / name
        run_case(case, entrants(chosen, case), folder, pythons, plan, results, given.stages)
        if not given.keep:
            shutil.rmtree(folder)


def run_case(
    case: Case,
    chosen: list[Contestant],
    folder: Path,
    pythons: dict[str, Path],
    plan: Plan,
    results: Path,
    stages: Sequence[str],
) -> Results:
    """Measure one kind of samples, and add it to the results."""
    found = Results.read(results, case.name)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"== {case.name}: {len(chosen)} contestants", flush=True)
    with running(chosen, case, folder, pythons) as children:
        match = Match(case, children, found, folder, results)
        match.write()
        versions = match.versions()
        found.about = facts(case) | {"versions": found.about.get("versions", {}) | versions}
        try:
            if "try" in stages:
                match.try_settings(plan)
            if "play" in stages:
                match.play(plan)
        finally:
            found.write(results)
    return found


def facts(case: Case) -> dict[str, object]:
    """Return what the figures depend on."""
    nbytes = sum(value.nbytes for values, _ in case.each_shard() for value in values)
    return machine() | {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "samples": case.samples,
        "data_bytes": nbytes,
        "step_seconds": case.step_seconds,
    }


def commit() -> str:
    """Return the commit that is measured; ``unknown`` where this is no clone."""
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def summary(found: dict[str, Results]) -> dict[str, object]:
    """Return the goals with their figures, and all rounds."""
    verdicts = [asdict(goal) | {"met": goal.met} for goal in goals(found)]
    return {"goals": verdicts, "cases": {case: asdict(r) for case, r in found.items()}}


def tell(found: dict[str, Results]) -> None:
    """Print where the figures come from, and what must be shown."""
    print(about(found))
    for goal in goals(found):
        print(f"  {goal.case:7} {goal.what:60} {number(goal.value):>8}  {goal.verdict}")


if __name__ == "__main__":
    sys.exit(main())
