"""Runs the contestants of a case: all write, settings are tried, then rounds in turns."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import Case
from benchmarks.peers.children import Child, ContestantError, GoneError
from benchmarks.peers.loops import LOOPS
from benchmarks.peers.proof import expected
from benchmarks.peers.results import Results, Round
from benchmarks.peers.roster import Contestant

WRITTEN = "written"
LIMIT_SECONDS = 150.0  # of a round; of writing four times as much


@dataclass(frozen=True, slots=True)
class Plan:
    """How long is measured.

    Attributes:
        rounds: of each contestant and loop.
        seconds: that are timed in a round.
        trial_seconds: the same, of a trial.
        lead_seconds: of each lead-in but the first, which is a whole epoch.
        steps: how many times as long is timed where there are steps, which are far fewer
            than the batches that come without, and wait but for some of them.
    """

    rounds: int
    seconds: float = 0.8
    trial_seconds: float = 0.25
    trials: int = 5
    lead_seconds: float = 2.0
    steps: float = 3.0

    def limits(self, loop: str, lead_seconds: float | None) -> dict[str, Any]:
        """Return those of a round."""
        longer = self.steps if loop == "steps" else 1.0
        return {"seconds": longer * self.seconds, "lead_seconds": lead_seconds}

    def trial_limits(self, loop: str) -> dict[str, Any]:
        """Return those of a trial."""
        longer = self.steps if loop == "steps" else 1.0
        return {
            "seconds": longer * self.trial_seconds,
            "lead_seconds": min(1.0, self.lead_seconds),
        }


@contextmanager
def running(
    chosen: list[Contestant], case: Case, folder: Path, pythons: Mapping[str, Path]
) -> Iterator[list[Child]]:
    """Start all contestants of a case together, and wait until they stand still."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(c, case, folder / c.module, pythons[c.environment]))
            for c in chosen
        ]
        try:
            for child in children:
                child.ready()
            yield children
        finally:
            for child in children:  # all at once, because libraries take seconds to end
                child.end()


class Match:
    """The children of a case, and what they have shown so far.

    Args:
        case: that they play.
        children: those who are still in.
        results: to which everything is added.
        folder: of the data.
        kept: where the results are written after every round, because a run may be interrupted.
    """

    def __init__(
        self, case: Case, children: list[Child], results: Results, folder: Path, kept: Path
    ) -> None:
        self.case = case
        self.children = {child.contestant.module: child for child in children}
        self.results = results
        self.folder = folder
        self.kept = kept
        self._digest: int | None = None

    def write(self) -> None:
        """Have each write its files, if it has not."""
        for name, child in list(self.children.items()):
            mark = self.folder / f"{name}.{WRITTEN}"
            if mark.exists():
                continue
            began = time.perf_counter()
            shutil.rmtree(self.folder / name)  # what a run that was ended left behind
            (self.folder / name).mkdir()
            if self._asked(name, 4 * LIMIT_SECONDS, do="write") is not FAILED:
                mark.touch()
                print(
                    f"  {child.contestant.title} wrote for {time.perf_counter() - began:.1f} s"
                )

    def warm(self, name: str) -> None:
        """Read a contestant's files, so that they are in the page cache.

        Before every round, for some kernels reclaim what was not touched for a while, and
        others on the machine need memory.
        """
        for path in (self.folder / name).rglob("*"):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(8 << 20):
                        pass

    def versions(self) -> dict[str, str]:
        """Return the versions of all packages that take part."""
        found: dict[str, str] = {}
        for name, child in list(self.children.items()):
            packages = child.contestant.packages
            answer = self._asked(name, 30, do="versions", packages=packages)
            found |= {} if answer is FAILED else answer
        return found

    def try_settings(self, plan: Plan) -> None:
        """Try every setting of every contestant in both loops, those that are near again."""
        for trial, loop in itertools.product(range(plan.trials), ("idle", "steps")):
            for name, child in list(self.children.items()):
                for setting in child.contestant.settings:
                    if self.results.undecided(name, setting, loop, trial):
                        limits = plan.trial_limits(loop)
                        self._play(self.results.trials, name, setting, loop, limits, trial)

    def play(self, plan: Plan) -> None:
        """Run the rounds, contestants in turns; each round begins with another one."""
        begin = 1 + max((r["round"] for r in self.results.rounds), default=-1)
        for number in range(begin, begin + plan.rounds):
            for loop in LOOPS:
                lead = None if loop == "idle" and number == begin else plan.lead_seconds
                limits = plan.limits(loop, lead)
                for name in rotated(list(self.children), number):
                    setting = self.results.best(name, loop)
                    if setting is not None:
                        self._play(self.results.rounds, name, setting, loop, limits, number)
            print(f"  round {number} of {self.case.name}", flush=True)

    def _play(
        self,
        into: list[Round],
        name: str,
        setting: str,
        loop: str,
        limits: dict[str, Any],
        number: int,
    ) -> None:
        if name not in self.children:  # an earlier setting ended it
            return
        arguments = self.children[name].contestant.settings[setting]
        command = {"do": "round", "setting": arguments, "loop": loop, "limits": limits}
        self.warm(name)
        began = time.perf_counter()
        answer = self._asked(name, LIMIT_SECONDS, setting_name=setting, **command)
        if answer is FAILED:
            return
        took = time.perf_counter() - began
        print(f"  {number} {loop:5} {took:5.1f} s  {name} {setting}", flush=True)
        if answer.get("digest") not in (None, self._expected()):
            self._out(name, "an epoch delivered other bytes than were written")
            return
        about = {"contestant": name, "setting": setting, "loop": loop, "round": number}
        into.append(about | answer)
        self.results.write(self.kept)

    def _expected(self) -> int:
        if self._digest is None:
            self._digest = expected(self.case)
        return self._digest

    def _asked(
        self, name: str, limit_seconds: float, setting_name: str = "", **command: Any
    ) -> Any:
        try:
            return self.children[name].ask(limit_seconds, **command)
        except GoneError as error:
            self._out(name, str(error))
        except ContestantError as error:
            print(f"  FAILED: {name} {setting_name}: {error}", flush=True)
            self.results.failures[f"{name} {setting_name}".strip()] = str(error)
        return FAILED

    def _out(self, name: str, why: str) -> None:
        """Leave a contestant out from now on; the page says why."""
        print(f"  OUT: {name}: {why}", flush=True)
        self.results.failures[name] = why
        self.children.pop(name).close()


def rotated(names: list[str], number: int) -> list[str]:
    """Return the names, from another one on.

    >>> rotated(["a", "b", "c"], 4)
    ['b', 'c', 'a']
    """
    first = number % len(names) if names else 0
    return names[first:] + names[:first]


FAILED = object()
