"""A few rounds of chaos for the everyday suite; ``make chaos`` runs longer."""

from __future__ import annotations

import pytest

from tests.chaos.run import Plan, run
from tests.chaos.schedule import READERS, RESUMABLE, STOPPED, TENSORFLOW, UNFINISHED
from tests.chaos.tally import Tally

NUMPY = (STOPPED, UNFINISHED, RESUMABLE)  # these start at once


def played(rounds: int, readers: tuple[str, ...]) -> Tally:
    said: list[str] = []
    wanted = Plan(11, 2, "moto", objects=60, readers=readers, rounds=rounds, aim_seconds=0.5)
    tally = run(wanted, said.append)
    assert not tally.violations, "\n".join(said)
    assert tally.rounds == rounds
    assert tally.all_kills >= rounds
    assert tally.drawn > 0
    assert tally.seen.looks > 100
    return tally


@pytest.mark.slow
def test_two_rounds() -> None:
    tally = played(2, NUMPY)
    assert {role for role, count in tally.samples.items() if count} == set(NUMPY)
    assert tally.events["objects purged"]


@pytest.mark.slow
def test_a_few_rounds_with_every_reader() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    tally = played(3, READERS)
    # On a busy machine TensorFlow's start takes as long as this whole run.
    assert {role for role, count in tally.samples.items() if count} >= {*READERS} - {TENSORFLOW}
