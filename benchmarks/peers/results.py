"""The results of rounds: one file per case, to which several runs may add, and medians."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Round = dict[str, Any]
# How far behind the best a setting may be and still be the best in truth, as a share of that:
# steps lose little, and a moment in which others use the machine may double it.
NEAR = {"idle": 0.3, "steps": 2.0}
STALL_NOISE_SECONDS = 3e-4  # of short trials, as trials of memcpy differ


@dataclass(slots=True)
class Results:
    """All that was measured of one case.

    Attributes:
        case: its name.
        about: machine, date, commit, versions, sizes; of the latest run.
        trials: short rounds, out of which settings are chosen.
        rounds: what is reported. Each has ``contestant``, ``setting``, ``loop``, ``round``
            (unique over runs), and the figures of `loops.one_round`.
        failures: what a contestant said, by its name.
    """

    case: str
    about: dict[str, Any] = field(default_factory=dict)
    trials: list[Round] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, case: str) -> Results:
        """Return what earlier runs left; nothing where there was none."""
        path = folder / f"{case}.json"
        return (
            cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls(case)
        )

    def write(self, folder: Path) -> None:
        """Keep it for the next run, and for the page."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {name: getattr(self, name) for name in self.__slots__}
        text = json.dumps(document, indent=1) + "\n"
        (folder / f"{self.case}.json").write_text(text, encoding="utf-8")

    def best(self, contestant: str, loop: str) -> str | None:
        """Return the setting that was quickest in the trials of a loop; None without one."""
        if loop == "gil":
            loop = "idle"
        tried = [t for t in self.trials if (t["contestant"], t["loop"]) == (contestant, loop)]
        settings = {t["setting"] for t in tried}

        def quality(setting: str) -> float:
            return statistics.median(rank(t) for t in tried if t["setting"] == setting)

        return max(sorted(settings), key=quality, default=None)

    def undecided(self, contestant: str, setting: str, loop: str, trials: int) -> bool:
        """Whether a setting may still turn out to be the best after ``trials`` trials.

        It may if it was never tried, or is behind the best by no more than `NEAR` of that, or
        than stalls are known to, and there is another that may as well.
        """
        tried = [t for t in self.trials if (t["contestant"], t["loop"]) == (contestant, loop)]
        ranks: dict[str, list[float]] = {}
        for trial in tried:
            ranks.setdefault(trial["setting"], []).append(rank(trial))
        if setting not in ranks:
            return True
        medians = {name: statistics.median(found) for name, found in ranks.items()}
        best = max(medians.values())
        slack = max(NEAR[loop] * abs(best), STALL_NOISE_SECONDS if loop == "steps" else 0.0)
        near = {name for name, found in medians.items() if found >= best - slack}
        return len(ranks[setting]) <= trials and setting in near and len(near) > 1

    def rounds_of(self, contestant: str, loop: str) -> list[Round]:
        """Return the rounds of a contestant in its best setting."""
        setting = self.best(contestant, loop)
        return [
            r
            for r in self.rounds
            if (r["contestant"], r["loop"], r["setting"]) == (contestant, loop, setting)
        ]

    def median(self, contestant: str, loop: str, of: Callable[[Round], Any]) -> float | None:
        """Return the median over rounds of a figure; None where no round has it."""
        values = [of(r) for r in self.rounds_of(contestant, loop)]
        found = [value for value in values if value is not None]
        return statistics.median(found) if found else None

    def ratio(
        self, contestant: str, other: str, loop: str, name: str, over: str = ""
    ) -> float | None:
        """Return the median of the quotients of a figure within the same rounds.

        Args:
            contestant: whose figure is divided
            other: by that of this one.
            loop: of the rounds.
            name: of the figure.
            over: that of the other, where it is another one.
        """
        theirs = {r["round"]: r.get(over or name) for r in self.rounds_of(other, loop)}
        pairs = [
            (r.get(name), theirs.get(r["round"])) for r in self.rounds_of(contestant, loop)
        ]
        quotients = [a / b for a, b in pairs if a and b]
        return statistics.median(quotients) if quotients else None


def rank(trial: Round) -> float:
    """Return how good a round was: bytes per second, or how little a step lost."""
    if trial["loop"] == "steps":
        return -lost_seconds(trial)
    return float(trial.get("bytes_per_second", 0.0))


def lost_seconds(round_: Round) -> float:
    """Return what a step waited, gaps between epochs included, and was held up by besides."""
    waited = round_.get("sustained_wait_seconds", float("inf"))
    return float(waited + max(0.0, round_.get("stall_seconds", 0.0)))


def gaps(rounds: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return every epoch gap of some rounds, in seconds."""
    found: list[float] = []
    for r in rounds:
        found += r.get("gap_seconds", [])
        if r.get("lead_gap_seconds") is not None:
            found.append(r["lead_gap_seconds"])
    return found
