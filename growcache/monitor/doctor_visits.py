"""Measure visits with the samplers' own code, if reads do not show how many samples they yield."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from growcache.config import Config
from growcache.errors import ConfigError, GrowcacheError
from growcache.monitor.doctor_facts import StoreFacts
from growcache.monitor.doctor_store import trouble_of
from growcache.monitor.plan_source import Look, look_at_source
from growcache.threads import DaemonThread

LOOK_SECONDS = 60.0  # because user code may hang
# Times: if reads are this much faster than visits, the transform takes the time.
MUCH_FASTER = 2.0


def needs_visits(config: Config, stores: Sequence[StoreFacts]) -> bool:
    """Whether user code makes samples, or objects are joined.

    For mixed sources the reads must do.
    """
    if len(stores) > 1 or stores[0].trouble:
        return False
    return stores[0].samples is None or config.sampling.transform is not None


def with_visits(config: Config, facts: StoreFacts) -> StoreFacts:
    """Return the facts about visits, or their error if they are impossible."""
    thread = DaemonThread("doctor-visits")
    looked = thread.submit(lambda: look_at_source(config))
    thread.close(wait=False)
    if not looked.wait(LOOK_SECONDS):
        return replace(facts, message=f"no visit ended within {LOOK_SECONDS:.0f} s")
    try:
        return facts_of_look(facts, looked.result())
    except ConfigError:
        raise
    except GrowcacheError as error:
        return replace(facts, **trouble_of(error))


def facts_of_look(facts: StoreFacts, look: Look) -> StoreFacts:
    timings, rate = look.timings, look.timings.rate
    reads_alone, busy = facts.samples_per_second, min(1.0, rate * timings.cpu_seconds)
    if reads_alone is not None and reads_alone > MUCH_FASTER * rate * look.samples_of_visit:
        busy = 1.0  # the transform delays the process, whether it computes or sleeps
    return replace(
        facts,
        message="",
        objects=max(facts.objects, look.objects),
        read_seconds=timings.alone_seconds,
        loaded_read_seconds=timings.in_flight / rate,
        concurrency=timings.in_flight,
        reads=timings.visits,
        bytes=timings.nbytes,
        seconds=timings.visits / rate,
        samples=float(timings.samples),
        sample_bytes=look.sample_bytes,
        read_bytes=round(timings.visit_bytes),
        samples_per_read=look.samples_of_visit,
        cpu_share=busy,
    )
