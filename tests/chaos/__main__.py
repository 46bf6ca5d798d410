"""``python -m tests.chaos --seed 1 --minutes 5``: see `tests.chaos`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.chaos.run import Plan, run
from tests.chaos.tally import markdown, write_section


def main() -> int:
    """Run with the given arguments; return 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--server", choices=["auto", "ceph", "moto"], default="auto")
    parser.add_argument("--heavy-tailed", action="store_true", help="sizes of samples")
    parser.add_argument("--report", type=Path, help="a page whose section is written")
    given = parser.parse_args()
    wanted = Plan(
        given.seed,
        given.minutes,
        given.server,
        rounds=given.rounds,
        heavy_tailed=given.heavy_tailed,
    )
    tally = run(wanted, lambda text: print(text, flush=True))
    text = markdown(tally)
    print(f"\n{text}\n")
    if given.report is not None:
        write_section(given.report, text)
    for violation in tally.violations:
        print(violation)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
