"""A cluster that does not answer is said, and left after a time; one that answers again is kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from growcache.sampling.engines import cluster_watch
from growcache.sampling.engines.cluster_watch import reason_to_reconnect


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_watch, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(cluster_watch, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(cluster_watch, "MOST_SILENT_SECONDS", 0.2)


def watched(answers: Iterator[bool]) -> tuple[str, list[bool]]:
    """Return why the cluster is left, and what was said of its silence before."""
    said: list[bool] = []
    reason = asyncio.run(
        asyncio.wait_for(reason_to_reconnect(answers.__next__, said.append), timeout=300)
    )
    return reason, said


def test_a_node_that_left_the_cluster_is_left() -> None:
    assert watched(iter([True, True, False])) == ("the Ray node of this machine died", [])


def test_a_refusal_or_a_question_without_an_answer_is_silence_until_an_answer() -> None:
    late = threading.Event()
    threading.Timer(0.12, late.set).start()

    def answers() -> Iterator[bool]:
        yield True
        yield late.wait(300)
        yield False

    assert watched(answers()) == ("the Ray node of this machine died", [True, False])


def test_a_head_that_stays_silent_is_left() -> None:
    over = threading.Event()

    def answers() -> Iterator[bool]:
        yield True
        threading.Timer(0.5, over.set).start()
        over.wait(300)
        yield True

    reason, said = watched(answers())
    assert reason.startswith("Ray's head has not answered for")
    assert said == [True]


def test_errors_are_silence() -> None:
    def refuse() -> bool:
        raise ConnectionError("no head")

    said: list[bool] = []
    assert "has not answered" in asyncio.run(reason_to_reconnect(refuse, said.append))
    assert said == [True]
