"""Make the runs that the results do not have yet: `python -m benchmarks.accuracy [NAME …]`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

import benchmarks.accuracy as about
from benchmarks.accuracy import cache_size, hard_case, reuse
from benchmarks.accuracy.experiment import Experiment, make_runs
from benchmarks.accuracy.page import write_tables
from benchmarks.accuracy.results import HERE, Run, read_rows
from benchmarks.accuracy.tables import markdown

EXPERIMENTS = {one.EXPERIMENT.name: one.EXPERIMENT for one in (reuse, hard_case, cache_size)}


def main() -> None:
    parser = argparse.ArgumentParser(description=about.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument(
        "--quick", action="store_true", help="a seed of few steps, whose results are not kept"
    )
    parser.add_argument(
        "--seeds", type=int, help="how many, from 0 on (default: as in margins.md)"
    )
    parser.add_argument(
        "--arms", default="*", help="a pattern of 'experiment, arm', such as '*, growing *'"
    )
    parser.add_argument(
        "--tables", action="store_true", help="print the results, and run nothing"
    )
    parser.add_argument(
        "--figures",
        action="store_true",
        help="write the pictures and tables of docs/evidence.md from the results, and run nothing",
    )
    given = parser.parse_args()
    if unknown := set(given.names) - EXPERIMENTS.keys():
        parser.error(
            f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}"
        )
    if given.figures:
        write_evidence()
        return
    # On SIGTERM a benchmark must unwind, because otherwise its service outlives it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in given.names or EXPERIMENTS:
        if not given.tables:
            measure(EXPERIMENTS[name], given.seeds, given.arms, quick=given.quick)
        if not given.quick:
            show(EXPERIMENTS[name])


def write_evidence() -> None:
    from benchmarks.accuracy import drawing, figures, network, target_figures  # need matplotlib

    write_tables()
    if by_arm := network.read_seconds():
        drawing.save(target_figures.network_figure(by_arm), "network")
    if to_target := read_rows(HERE / "to_target.csv"):
        drawing.save(target_figures.first_screen_figure(to_target), "first_screen")
    for name in figures.FIGURES:
        figures.draw(name, read_rows(HERE / f"{name}.csv"))


def measure(experiment: Experiment, seeds: int | None, arms: str, *, quick: bool) -> None:
    def chosen(name: str) -> bool:
        return fnmatch(name, arms)

    if quick:
        with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
            make_runs(experiment, range(1), Path(folder) / "quick.csv", chosen, quick=True)
    else:
        make_runs(experiment, range(seeds or experiment.seeds), experiment.results, chosen)


def show(experiment: Experiment) -> None:
    curves = read_rows(experiment.results)
    for title in experiment.variants:
        if Run(title, experiment.reference, 0) in curves:
            table = markdown(curves, title, experiment.reference, experiment.metric)
            print(f"\n{title}\n\n{table}")


if __name__ == "__main__":
    main()
