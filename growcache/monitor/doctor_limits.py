"""The resource that limits a service, or a training run on its cache, and what to buy or set.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from growcache.humanize import in_bytes, in_count, in_percent, plural
from growcache.loading.report_table import WARN_REUSE
from growcache.monitor.doctor import THROTTLED_SHARE
from growcache.monitor.doctor_facts import DoctorFacts, StoreFacts

Resource = Literal[
    "training", "loader", "disk", "link", "latency", "throttling", "cpu", "setting", "unknown"
]

BUSY_CPU_SHARE = 0.85
# If a store answers this fast, a core does not wait for the link.
NEAR_STORE_SECONDS, NEAR_CPU_SHARE = (0.002, 0.5)
QUEUED_READ_RATIO = 1.5  # on a full link, a read among others takes this many times as long
WAIT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Limit:
    """The limiting resource, the reason, and what to buy or set."""

    resource: Resource
    text: str
    advice: str = ""
    supply: float | None = None  # samples per second that can be drawn
    reuse: float | None = None  # of the consumption with this supply


@dataclass(frozen=True, slots=True)
class _Cause:
    resource: Resource
    text: str
    advice: str


def find_limit(facts: DoctorFacts) -> Limit:
    broken = next((one for one in facts.stores if one.trouble), None)
    if broken is not None or not facts.stores:
        return Limit("unknown", "the limit is unknown until the store yields samples")
    if all(one.bytes_per_second is one.samples_per_second is None for one in facts.stores):
        return Limit("unknown", "the limit is unknown, because no store was measured")
    slowest = min(facts.stores, key=lambda one: _mixed_rate(one) or float("inf"))
    cause, supply = _fill_cause(facts, slowest), drawn_per_second(facts)
    consumed = facts.training.consumed_per_second
    if consumed is None:
        return Limit(cause.resource, _filling_text(facts, cause, supply), cause.advice, supply)
    return _limit_of_training(facts, cause, supply, consumed)


def drawn_per_second(facts: DoctorFacts) -> float | None:
    """Return the samples per second that a service can draw, or None if samples were not measured.

    Mixed sources keep their proportions, so the slowest relative to its share sets the rate.
    The reads were made in one process. If its core was busy, several samplers draw more.
    """
    rates = [rate for one in facts.stores if (rate := _mixed_rate(one)) is not None]
    if not rates:
        return None
    supply, busy = min(rates), max(one.cpu_share for one in facts.stores)
    if busy > BUSY_CPU_SHARE:
        machine = facts.machine
        supply *= min(machine.workers, machine.cores) + machine.workers_elsewhere
    supply += facts.training.drawn_per_second  # a running service uses the rest of the link
    if (limit := facts.max_bytes_per_second) is not None and (size := _fetched_bytes(facts)):
        supply = min(supply, limit / size)
    if facts.disk.write_bytes_per_second and facts.sample_bytes:
        supply = min(supply, facts.disk.write_bytes_per_second / facts.sample_bytes)
    return supply


def _mixed_rate(store: StoreFacts) -> float | None:
    rate = store.samples_per_second
    return None if rate is None else rate / max(store.share, 1e-9)


def _fetched_bytes(facts: DoctorFacts) -> float | None:
    """Return the mean bytes that a drawn sample takes from the store."""
    known = [(one.bytes / one.samples, one.share) for one in facts.stores if one.samples]
    total = sum(share for _, share in known)
    return sum(size * share for size, share in known) / total if total else None


def _fill_cause(facts: DoctorFacts, store: StoreFacts) -> _Cause:
    rate = store.bytes_per_second or 0.0
    limit = facts.max_bytes_per_second
    if store.throttled_share > THROTTLED_SHARE:
        return _Cause(
            "throttling",
            f"the store refuses {in_percent(store.throttled_share)} of the reads",
            "ask the provider for a higher limit, spread keys over prefixes, or keep the reads in "
            "flight below it (sampling.concurrency)",
        )
    if limit is not None and limit < rate:
        return _Cause(
            "setting",
            f"sampling.max_bytes_per_second allows {in_bytes(limit)}/s of {in_bytes(rate)}/s",
            "raise sampling.max_bytes_per_second if the link may be used more",
        )
    if facts.disk.write_bytes_per_second and facts.disk.write_bytes_per_second < rate:
        written = f"{in_bytes(facts.disk.write_bytes_per_second)}/s"
        return _Cause(
            "disk",
            f"the disk writes {written}, and the store brings {in_bytes(rate)}/s",
            "put cache.path on a faster disk (NVMe)",
        )
    return _cause_of_reads(facts, store)


def _cause_of_reads(facts: DoctorFacts, store: StoreFacts) -> _Cause:
    reads = plural(store.concurrency, "read")
    near = (store.first_byte_seconds or 1.0) < NEAR_STORE_SECONDS
    if store.cpu_share > (NEAR_CPU_SHARE if near else BUSY_CPU_SHARE):
        machine = facts.machine
        few = machine.workers < machine.cores or machine.workers_elsewhere > 0
        more = f"set sampling.workers to {machine.cores}"
        if machine.workers_elsewhere:
            more = "raise sampling.ray.workers"
        return _Cause(
            "cpu",
            "decoding and transform keep a process busy, and the store could give more",
            more if few else "a machine with more cores, or a cheaper format or transform",
        )
    alone, loaded = store.read_seconds, store.loaded_read_seconds
    if alone and loaded and loaded < QUEUED_READ_RATIO * alone:
        return _Cause(
            "latency",
            f"{reads} in flight take {1000 * loaded:.0f} ms each, about as long as one alone: the link "
            "has room for more",
            f"raise sampling.concurrency to {2 * facts.machine.concurrency} (or sampling.workers); "
            "larger sampling.samples_per_object brings more samples with each read",
        )
    if near:
        return _Cause(
            "link",
            f"the store is near, and is not faster with {reads} in flight",
            "a faster disk or server for the source",
        )
    return _Cause(
        "link",
        f"{reads} in flight fill the link to the store",
        "a faster link, a machine in the region of the bucket, or fewer bytes per sample (smaller "
        "windows, compressed objects)",
    )


def _filling_text(facts: DoctorFacts, cause: _Cause, supply: float | None) -> str:
    rate = sum(one.bytes_per_second or 0.0 for one in facts.stores)
    brings = f"{in_count(supply)} samples/s" if supply is not None else f"{in_bytes(rate)}/s"
    return f"the cache can grow by {brings}: {cause.text}"


def _limit_of_training(
    facts: DoctorFacts, cause: _Cause, supply: float | None, consumed: float
) -> Limit:
    reuse = consumed / supply if supply else None
    if (disk := _disk_limit(facts, consumed)) is not None:
        return Limit("disk", *disk, supply, reuse)
    waited = facts.training.wait_share
    if waited is not None and waited > WAIT_SHARE:
        return _limit_of_waits(facts, waited, supply, reuse)
    uses = f"training consumes {in_count(consumed)} samples/s"
    if supply is None or reuse is None:
        return Limit("unknown", f"{uses}; how many the store brings was not measured")
    brings = f"the service can draw {in_count(supply)}/s"
    if reuse <= 1:
        return Limit("training", f"{uses}, and {brings}: training limits", "", supply, reuse)
    each = f"so each sample is used about {reuse:.1f} times"
    if reuse <= WARN_REUSE:
        fresh = f"{uses}, {brings}, {each}: few enough"
        return Limit("training", fresh, "", supply, reuse)
    wanted = f"for at most {WARN_REUSE:.0f} uses it takes {in_count(consumed / WARN_REUSE)}/s"
    text = f"{uses}, {brings}, {each}; {wanted}. Freshness is limited: {cause.text}"
    return Limit(cause.resource, text, cause.advice, supply, reuse)


def _disk_limit(facts: DoctorFacts, consumed: float) -> tuple[str, str] | None:
    """Return the limit of a disk that reads too slowly, unless memory holds the cache."""
    read, size = facts.disk.read_bytes_per_second, facts.sample_bytes
    in_memory = facts.disk.max_bytes <= facts.machine.available_bytes // 2
    if not read or not size or in_memory or read >= consumed * size:
        return None
    text = (
        f"training consumes {in_bytes(consumed * size)}/s, and the disk reads {in_bytes(read)}/s: "
        "the loop waits for the disk"
    )
    memory = in_bytes(2 * facts.disk.max_bytes)
    return text, f"a faster disk (NVMe) for cache.path, or memory for all of it ({memory})"


def _limit_of_waits(
    facts: DoctorFacts, waited: float, supply: float | None, reuse: float | None
) -> Limit:
    job, share = facts.training.job, in_percent(waited)
    if facts.training.waiting_for:
        text = f"job {job} waits {share} of its time, and the service waits for {facts.training.waiting_for}"
        return Limit("setting", text, "growcache status says what it needs", supply, reuse)
    return Limit(
        "loader",
        f"job {job} waits for batches {share} of its time, though they are cached",
        "num_workers for a transform that computes, a larger batch_size, or fewer bytes per "
        "sample; loader.report says limited_by",
        supply,
        reuse,
    )
