"""Waiting for a store that refuses or is silent: which permits are tried, and the messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from growcache.config import Config
from growcache.config_text import load_config
from growcache.sampling.config_reload import merged_config
from growcache.sampling.group_queue import GroupQueue
from growcache.sampling.rate_limiter import (
    LONGEST_DELAY_SECONDS,
    NOTICE_SECONDS,
    OVER_SECONDS,
    RECENT_SECONDS,
    SAY_SECONDS,
    CircuitBreaker,
    LimiterInputs,
    OutageNotice,
    StoreSilence,
    decide,
)

WORDS = "credentials (s3://b: the credentials have expired)"


def halted() -> CircuitBreaker:
    halt = CircuitBreaker()
    halt.granted("first")
    halt.refused("first", WORDS, 0.0)
    return halt


def test_one_group_at_a_time_is_on_trial() -> None:
    halt = halted()
    assert halt.is_open(0.0)
    assert not halt.is_open(LONGEST_DELAY_SECONDS)
    halt.granted("trial")
    assert halt.is_open(100.0)
    halt.answered("first", whole=False)  # of a group that took off before
    assert halt.waiting_for == WORDS
    halt.answered("trial", whole=False)
    assert not halt.waiting_for
    assert not halt.is_open(100.0)


def test_what_is_refused_again_has_to_bring_a_whole_group() -> None:
    """Of a mixture the other sources answer: what is read of them is fetched in vain."""
    halt = halted()
    halt.granted("trial")
    halt.answered("trial", whole=False)
    halt.refused("trial", WORDS, 1.0)
    halt.granted("again")
    halt.answered("again", whole=False)
    assert halt.waiting_for == WORDS
    halt.answered("again", whole=True)
    assert not halt.waiting_for


@given(st.lists(st.sampled_from(["refused", "ended"]), max_size=40))
def test_trials_never_end_and_never_come_late(ends: list[str]) -> None:
    halt, now = halted(), 0.0
    for number, end in enumerate(ends):
        now += LONGEST_DELAY_SECONDS
        assert not halt.is_open(now)
        halt.granted(str(number))
        if end == "refused":
            halt.refused(str(number), WORDS, now)
        else:
            halt.ended(str(number), now)
        assert halt.is_open(now)


def test_a_refused_group_costs_no_try() -> None:
    queue = GroupQueue(0, ())
    for _ in range(20):
        queue.start(0)
        queue.returned(0)
        assert queue.due(0.0) == 0
    assert queue.failing == 0


def test_nothing_else_is_waited_for_while_the_store_refuses() -> None:
    verdict = decide(
        LimiterInputs(refused=WORDS, complete=True, for_refetch=True, room_bytes=100)
    )
    assert not verdict.granted
    assert not verdict.final
    assert verdict.waiting_for == WORDS


def test_a_silence_is_noticed_when_failures_are_all_there_is() -> None:
    silence = StoreSilence()
    silence.failed("the store to answer (x)", 10.0)
    assert not silence.waiting_for(10.0)
    assert silence.waiting_for(10.0 + NOTICE_SECONDS) == "the store to answer (x)"
    assert not silence.waiting_for(10.0 + RECENT_SECONDS)
    silence.failed("the store to answer (x)", 12.0)
    silence.answered()
    assert not silence.waiting_for(13.0 + NOTICE_SECONDS)


def test_a_refusal_is_noticed_at_once() -> None:
    silence = StoreSilence()
    silence.failed(WORDS, 10.0, refused=True)
    assert silence.waiting_for(10.0) == WORDS


def test_it_is_said_once_and_once_that_it_is_over() -> None:
    notice = OutageNotice()
    assert notice.look(WORDS, 0.0) == []
    (said,) = notice.look(WORDS, SAY_SECONDS)
    assert WORDS in said
    assert notice.look("", 4.0) == []  # on trial
    assert notice.look(WORDS, 4.5) == []
    assert notice.look("", 5.0) == []
    assert notice.look("", 5.0 + OVER_SECONDS) == ["the store answers again"]
    assert notice.look("", 60.0) == []


def test_what_lasts_for_a_moment_is_not_worth_a_word() -> None:
    notice = OutageNotice()
    assert notice.look(WORDS, 0.0) == []
    assert notice.look("", 1.0) == []
    assert notice.look("", 1.0 + OVER_SECONDS) == []


def config(*sources: dict[str, object]) -> Config:
    source = sources[0] if len(sources) == 1 else list(sources)
    return load_config({"source": source, "cache": {"path": "c"}})


def s3(url: str = "s3://b/*", **options: object) -> dict[str, object]:
    return {"url": url, "format": "npy", "storage_options": options}


def test_who_asks_may_change_while_the_service_runs() -> None:
    found, restart_for = merged_config(
        config(s3(key="a", secret="b")), config(s3(key="c", secret="d"))
    )
    assert restart_for == []
    assert found.sources[0].storage_options == {"key": "c", "secret": "d"}


def test_of_several_sources_too() -> None:
    before = config(s3(key="a", secret="b"), s3("s3://c/*", key="a", secret="b"))
    after = config(s3(key="a", secret="b"), s3("s3://c/*", key="x", secret="y"))
    found, restart_for = merged_config(before, after)
    assert restart_for == []
    assert found.sources[1].storage_options == {"key": "x", "secret": "y"}


def test_whom_is_asked_needs_a_restart() -> None:
    before = config(s3(endpoint_url="http://a:1", key="a", secret="b"))
    after = config(s3(endpoint_url="http://b:1", key="a", secret="b"))
    found, restart_for = merged_config(before, after)
    assert restart_for == ["source.storage_options"]
    assert found == before
