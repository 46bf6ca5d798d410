"""Three answers about a cache: is training fed, is it growing, and what does it wait for.

Pure.

The page, the terminal and the report show the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from growcache.cache.status_model import JobStatus, Status
from growcache.humanize import in_bytes, in_count, in_percent, in_time, plural
from growcache.loading.report_table import WARN_REUSE

Level = Literal["ok", "warn", "bad"]

RECENT_SECONDS = 300.0
LEAST_SECONDS = 5.0  # for a rate
LITTLE_WAIT, MUCH_WAIT = 0.02, 0.10  # shares of a loop's time
LONG_SNAPSHOT_SECONDS = 900.0  # after which the reader of a snapshot may hang
STARVED_SECONDS = 10.0  # without a byte from the store
FULL_COVERAGE = 0.9999

FED = "Is training fed?"
GROWTH = "Is the cache growing or turning over?"
AWAITED = "What is it waiting for?"

START = "Start the service: growcache run CONFIG"


@dataclass(frozen=True, slots=True)
class Answer:
    question: str
    answer: str
    level: Level = "ok"
    action: str = ""  # empty if nothing needs to be done


@dataclass(frozen=True, slots=True)
class Answers:
    fed: Answer
    growth: Answer
    awaited: Answer


@dataclass(frozen=True, slots=True)
class Recently:
    """The changes of counters in the last minutes. ``seconds`` is 0 while nothing is known."""

    seconds: float = 0.0
    samples: int = 0
    bytes: int = 0
    drawn: int = 0
    evicted: int = 0
    delivered: int = 0
    deliveries: Mapping[str, int] = field(default_factory=dict)  # samples, by job
    waits: Mapping[str, float] = field(default_factory=dict)  # seconds, by job


class RecordOfJob(Protocol):
    @property
    def delivered(self) -> int | None: ...
    @property
    def wait_seconds(self) -> float | None: ...


class Record(Protocol):
    """The needed parts of a record of the history."""

    @property
    def at(self) -> float: ...
    @property
    def samples(self) -> int | None: ...
    @property
    def bytes(self) -> int | None: ...
    @property
    def drawn(self) -> int | None: ...
    @property
    def evicted_samples(self) -> int | None: ...
    @property
    def delivered(self) -> int | None: ...
    @property
    def jobs(self) -> Mapping[str, RecordOfJob]: ...  # only those that changed


def recent_changes(records: Sequence[Record], status: Status) -> Recently:
    """Return the changes between ``status`` and a record of this run, from some minutes ago."""
    now = status.updated_at or 0.0
    earliest = max(now - RECENT_SECONDS, status.started_at or 0.0)
    recent = [r for r in records if earliest <= r.at <= now - LEAST_SECONDS]
    if not recent:
        return Recently()
    before = recent[0]
    return Recently(
        seconds=now - before.at,
        samples=status.samples - (before.samples or 0),
        bytes=status.bytes - (before.bytes or 0),
        drawn=_growth_of(before.drawn, status.drawn),
        evicted=_growth_of(before.evicted_samples, status.evicted_samples),
        delivered=_growth_of(before.delivered, status.delivered),
        deliveries={job.name: _recent_deliveries(recent, job) for job in status.jobs},
        waits={job.name: _recent_wait(recent, job) for job in status.jobs},
    )


def _growth_of(before: int | None, now: int) -> int:
    return 0 if before is None else max(0, now - before)


# A record has only the jobs that changed, so a job without a recent record did nothing.


def _recent_wait(recent: Sequence[Record], job: JobStatus) -> float:
    waits = (r.jobs[job.name].wait_seconds for r in recent if job.name in r.jobs)
    before = next((wait for wait in waits if wait is not None), job.waits.seconds)
    return max(0.0, job.waits.seconds - before)


def _recent_deliveries(recent: Sequence[Record], job: JobStatus) -> int:
    counts = (r.jobs[job.name].delivered for r in recent if job.name in r.jobs)
    before = next((count for count in counts if count is not None), job.delivered)
    return max(0, job.delivered - before)


def answers_without_cache(path: str) -> Answers:
    """Return the answers while there is no cache at a path."""
    return Answers(
        Answer(FED, "Not yet: there is no cache to read.", "warn"),
        Answer(GROWTH, f"Neither: there is no cache at {path} yet.", "warn"),
        Answer(AWAITED, "For a service that creates it.", "warn", START),
    )


def answer_questions(status: Status, recent: Recently | None = None) -> Answers:
    recent = recent or Recently()
    return Answers(_fed(status, recent), _growth(status, recent), _awaited(status))


def _about(seconds: float) -> str:
    """Return a duration as people say it, without the smaller unit if that adds little.

    >>> _about(42), _about(88), _about(295), _about(2530), _about(7300)
    ('42 s', '88 s', '5 min', '42 min', '2 h 1 min')
    """
    if seconds < 120:
        return f"{round(seconds)} s"
    return in_time(seconds) if seconds >= 3600 else f"{round(seconds / 60)} min"


def _rate(per_second: float) -> str:
    """Return a rate, with a fraction if it is small.

    >>> _rate(0.26), _rate(2), _rate(1234.5)
    ('0.3', '2', '1,234')
    """
    return f"{per_second:.1f}".removesuffix(".0") if per_second < 10 else in_count(per_second)


# Is training fed?


def wait_share(status: Status, recent: Recently, job: JobStatus) -> float | None:
    """Return the mean share of the recent time in which each loop of a job waited for data."""
    if not recent.seconds:
        return None
    loops = max(1, status.loop_count(job.name))
    return min(1.0, recent.waits.get(job.name, 0.0) / recent.seconds / loops)


def _fed(status: Status, recent: Recently) -> Answer:
    reading = [job for job in status.jobs if job.open]
    if not reading:
        return _unread(status)
    job = max(reading, key=lambda one: wait_share(status, recent, one) or 0.0)
    share = wait_share(status, recent, job)
    if not any(one.delivered for one in reading):
        text = f"Not yet: job {job.name} has received no sample so far."
        return Answer(FED, text, "bad" if status.state == "stopped" else "warn")
    if share is None:
        text = f"Job {job.name} is reading: {plural(job.delivered, 'sample')} so far."
        return Answer(FED, text)
    if share >= LITTLE_WAIT:
        return _hungry(status, recent, job, share)
    return _reused(status, recent) or Answer(FED, _fed_text(job, share, recent))


def _unread(status: Status) -> Answer:
    if not status.jobs:
        if status.samples:
            return Answer(FED, "No job has read this cache yet; it is ready to be read.")
        return Answer(FED, "No job has read this cache yet, and it is still empty.")
    last = status.jobs[-1]
    received = plural(last.delivered, "sample")
    return Answer(
        FED, f"No job is reading now. The last one, {last.name}, received {received}."
    )


def _fed_text(job: JobStatus, share: float, recent: Recently) -> str:
    rate = _rate(recent.delivered / recent.seconds)
    span = _about(recent.seconds)
    return f"Yes: {rate} samples/s; job {job.name} waited {in_percent(round(share, 4))} of the last {span}."


def _hungry(status: Status, recent: Recently, job: JobStatus, share: float) -> Answer:
    much = share >= MUCH_WAIT
    span = _about(recent.seconds)
    text = (
        f"{'No' if much else 'Nearly'}: job {job.name} waited {in_percent(share)} of the last {span} "
        "for its batches."
    )
    return Answer(FED, text, "bad" if much else "warn", _feeding_advice(status))


def _feeding_advice(status: Status) -> str:
    if status.wishes:
        return "It waits while shards of its checkpoint are fetched again; this ends by itself."
    return (
        "Batches come from the local disk, so the network is not the cause: raise num_workers if a "
        "transform is slow, or measure the disk and memory: growcache doctor CONFIG"
    )


def _reused(status: Status, recent: Recently) -> Answer | None:
    """Return a warning if a job gets the same samples repeatedly, although there are others."""
    job = max(recent.deliveries, key=recent.deliveries.__getitem__, default="")
    delivered = recent.deliveries.get(job, 0)
    if status.complete or delivered <= recent.drawn * WARN_REUSE:
        return None
    span = _about(recent.seconds)
    if not recent.drawn:
        text = f"Yes, but nothing new has come in the last {span}: it trains on samples it has seen before."
        return Answer(FED, text, "warn", "See what the service is waiting for.")
    often = f"{delivered / recent.drawn:.1f}"
    text = f"Yes, but mostly with samples it has seen before: job {job} received {often} for each one drawn."
    return Answer(FED, text, "warn", _reuse_advice(status))


def _reuse_advice(status: Status) -> str:
    if status.state == "stopped":
        return START
    if status.waiting_reason in ("readers", "room") or status.retired_shards:
        return (
            "At its bound the cache changes as readers end their passes; compare other sizes: "
            "growcache plan CONFIG --sweep"
        )
    if status.waiting_for:
        return "New samples come slowly because the service is waiting; see the third answer."
    return "If the link has capacity left, raise sampling.workers or sampling.concurrency; see growcache plan CONFIG"


# Is the cache growing or turning over?


def _growth(status: Status, recent: Recently) -> Answer:
    if status.complete or status.state == "complete":
        return Answer(GROWTH, f"Neither, it is complete: {_why_complete(status)}.")
    if status.state == "stopped":
        held = plural(status.samples, "sample")
        return Answer(GROWTH, f"Neither: no service runs. It keeps {held}.", "warn")
    if status.state == "shrinking":
        text = f"Shrinking to {in_bytes(status.target_bytes)}, from {in_bytes(status.bytes)}."
        return Answer(GROWTH, text, "warn")
    if not recent.seconds:
        return _growth_at_start(status)
    if not recent.drawn or (_is_halted(status) and not status.samples_per_second):
        return _standing_still(status, recent)
    rate = _rate(recent.drawn / recent.seconds)
    if recent.evicted * 2 >= recent.drawn or status.full:
        return Answer(GROWTH, _turnover_text(status, recent, rate))
    return Answer(GROWTH, _growing_text(status, recent, rate))


def _is_halted(status: Status) -> bool:
    """Whether it waits for something that may never happen, unlike a reader or a listing."""
    return status.state == "waiting" and advice_for(status)[0] == "bad"


def _why_complete(status: Status) -> str:
    if status.coverage is not None and status.coverage < FULL_COVERAGE:
        return "it is at its limit, and nothing is evicted"
    return "everything that can be read is cached" if status.holes else "all samples are cached"


def _growth_at_start(status: Status) -> Answer:
    if not status.drawn:
        return Answer(GROWTH, "Not yet: nothing has been drawn so far.")
    rate = _rate(status.samples_per_second)
    word = "Turning over" if status.full else "Growing"
    return Answer(GROWTH, f"{word}: {rate} samples/s are drawn.")


def _standing_still(status: Status, recent: Recently) -> Answer:
    if status.state == "full" and not status.waiting_for:
        return Answer(GROWTH, "Neither: it is full, and nothing is ever evicted.")
    text = f"Neither: nothing was drawn in the last {_about(recent.seconds)}."
    if recent.drawn:
        text = f"Neither now; {plural(recent.drawn, 'sample')} came in the last {_about(recent.seconds)}."
    awaited_level = advice_for(status)[0] if status.waiting_for else "warn"
    return Answer(
        GROWTH,
        text,
        "ok" if awaited_level == "ok" else "warn",
        "See what the service is waiting for.",
    )


def _turnover_text(status: Status, recent: Recently, rate: str) -> str:
    if not recent.evicted:
        return f"At its bound: {rate} samples/s are drawn, and older ones will make room."
    whole = _about(status.samples * recent.seconds / recent.evicted)
    return (
        f"Turning over: {rate} samples/s replace older ones, so all of it is new every {whole}."
    )


def _growing_text(status: Status, recent: Recently, rate: str) -> str:
    free = status.max_bytes - status.bytes - status.reserved_bytes
    ends = []
    if recent.bytes > 0 and free > 0:
        ends.append((free * recent.seconds / recent.bytes, "full"))
    if status.coverage is not None and status.population_samples:
        left = status.population_samples * (1 - status.coverage)
        ends.append((left * recent.seconds / recent.drawn, "all of it cached"))
    if not ends:
        return f"Growing: {rate} samples/s are drawn."
    seconds, end = min(ends)
    return f"Growing: {rate} samples/s are drawn; {end} in about {_about(max(1, seconds))}."


# What is it waiting for, and what should I do?

# The level of a waiting reason, and the remedy. For readers it depends on the reader.
ADVICE: Mapping[str, tuple[Level, str]] = {
    "start": ("ok", ""),
    "cluster": (
        "warn",
        "Check that Ray runs and has nodes for sampling.ray; the service retries by itself.",
    ),
    "store": (
        "bad",
        "Check that the store is up, reachable from here, and accepts the credentials; the "
        "service retries by itself.",
    ),
    "objects": (
        "warn",
        "Look at the recent errors; they are retried automatically.",
    ),
    "listing": ("ok", ""),
    "refetch": ("ok", ""),
    "work": ("ok", ""),
    "budget": ("warn", "Raise sampling.max_egress, and start the service again."),
    "disk": ("bad", "Free space on the disk, or lower cache.max_bytes or cache.min_free."),
    "index": ("warn", "End readers that hang; if that does not help, raise cache.max_bytes."),
    "room": ("ok", ""),
    "bound": ("warn", "Raise cache.max_bytes, or clear the cache."),
    "complete": ("ok", ""),
    "service": ("bad", "Let its process continue, or start the service again."),
}
UNKNOWN_ADVICE: tuple[Level, str] = ("warn", "")  # for a reason of another version


def advice_for(status: Status) -> tuple[Level, str]:
    """Return the level of a service's wait, and the remedy, or "" if it ends by itself."""
    if status.waiting_reason == "readers":
        return _advice_on_readers(status)
    return ADVICE.get(status.waiting_reason or "", UNKNOWN_ADVICE)


def _advice_on_readers(status: Status) -> tuple[Level, str]:
    if any(not lease.open for lease in status.leases):
        return (
            "warn",
            "If the run that died will not be resumed, release its shards: growcache release "
            "CACHE",
        )
    if _has_stuck_readers(status):
        return "warn", "It continues when that reader does; end the reader if it hangs."
    if not any(job.open for job in status.jobs):
        return "ok", "Start the training, or set cache.min_uses: 0 to keep drawing without it."
    return "ok", "At its bound the cache changes as readers end their passes."


def _has_stuck_readers(status: Status) -> bool:
    return bool(status.foreign_leases) or any(
        lease.age_seconds > LONG_SNAPSHOT_SECONDS for lease in status.leases
    )


def _awaited(status: Status) -> Answer:
    if status.state == "stopped":
        return _stopped(status)
    if status.waiting_for:
        return Answer(AWAITED, f"For {status.waiting_for}.", *advice_for(status))
    if status.complete or status.state in ("complete", "full"):
        return Answer(AWAITED, "For nothing.", *_other_advice(status))
    if _is_starved(status):
        text = "For the store: no byte has come from it lately."
        return Answer(AWAITED, text, *ADVICE["store"])
    return Answer(AWAITED, "For nothing: samplers are drawing.", *_other_advice(status))


def _stopped(status: Status) -> Answer:
    if status.complete:
        return Answer(AWAITED, "For nothing: no service runs, and none is needed.")
    reading = any(job.open for job in status.jobs)
    text = "For a service: none runs" + (
        ", while training reads the cache." if reading else "."
    )
    return Answer(AWAITED, text, "bad" if reading else "warn", START)


def _is_starved(status: Status) -> bool:
    is_idle = not status.bytes_per_second and not status.samples_per_second
    reading = any(worker.state == "reading" for worker in status.worker_states)
    return is_idle and reading and status.uptime_seconds > STARVED_SECONDS


def _other_advice(status: Status) -> tuple[Level, str]:
    if status.restart_for:
        keys = ", ".join(status.restart_for)
        return "warn", f"Restart the service, because the config changed in {keys}."
    if status.foreign_leases:
        return "warn", status.foreign_leases[0].advice
    return "ok", ""
