"""The findings of `growcache doctor`: measurements compared with the needs of a service.

Pure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from growcache.humanize import as_size, in_bytes, in_count, in_percent, in_time, plural
from growcache.monitor.doctor_facts import (
    DiskFacts,
    DoctorFacts,
    MachineFacts,
    StoreFacts,
    TrainingFacts,
)

Level = Literal["ok", "warn", "wrong"]

SLOW_DISK_BYTES_PER_SECOND = 50e6
SLOW_SYNC_SECONDS = 0.1
THROTTLED_SHARE = 0.02  # as much as the samplers' own limit on reads tolerates
SKEW_WARN_SECONDS, SKEW_WRONG_SECONDS = 60.0, 300.0  # S3 refuses 900
SLOW_LISTING_SECONDS = 10.0
CLOCK_BACK_SECONDS = 86_400.0
OTHER_FILES = 100  # open in a process, besides shards
ENOUGH_FILES = 1024  # usual limit
LEAST_CACHE_BYTES = 50_000_000
FILES_PER_SHARD = 3
SHARD_BYTES = 4_000_000  # a small size, so that the estimated number of files is high


@dataclass(frozen=True, slots=True)
class Finding:
    """A measured value, the expected one, and what to do if they differ."""

    level: Level
    about: str
    found: str
    expected: str = ""
    advice: str = ""


def find_all(facts: DoctorFacts) -> list[Finding]:
    several = len(facts.stores) > 1
    found = [
        finding
        for number, store in enumerate(facts.stores)
        for finding in store_findings(store, f"store {number}" if several else "store")
    ]
    found += disk_findings(facts.disk)
    found += machine_findings(facts.machine)
    found += training_findings(facts.training)
    return found


def store_findings(facts: StoreFacts, about: str = "store") -> Iterator[Finding]:
    yield from _listing(facts, about)
    yield from _reads(facts, about)
    yield from _throttling(facts, about)
    yield from _failures(facts, about)
    yield from _skew(facts, about)


_TROUBLE_EXPECTED = {
    "refused": "credentials that may list and read",
    "missing": "objects at source.url",
    "empty": "objects at source.url that hold bytes",
    "unreachable": "an answer of the store",
    "throttled": "a store that serves reads",
    "unreadable": "samples as source.format reads them",
}
_TROUBLE_ADVICE = {
    "refused": "correct the credentials, and run growcache doctor again",
    "missing": "check source.url, its bucket and its pattern",
    "empty": "check what source.url matches",
    "unreachable": "check the endpoint, the network and its proxies",
    "throttled": "send fewer requests: lower sampling.concurrency, or raise the limit of the store",
    "unreadable": "check source.format and source.options: growcache init proposes both",
}


def _listing(facts: StoreFacts, about: str) -> Iterator[Finding]:
    if facts.trouble:
        says_what = facts.trouble not in ("throttled", "unreachable") and ";" in facts.message
        advice = "" if says_what else _TROUBLE_ADVICE[facts.trouble]
        expected = _TROUBLE_EXPECTED[facts.trouble]
        yield Finding("wrong", about, facts.message or facts.trouble, expected, advice)
    elif facts.message:
        yield Finding("warn", about, facts.message)
    if facts.listing_seconds is None:
        return
    found = f"{facts.url} lists in {_in_seconds(facts.listing_seconds)}"
    if facts.listing_seconds > SLOW_LISTING_SECONDS:
        expected = f"a first page within {SLOW_LISTING_SECONDS:.0f} s"
        advice = "a manifest of keys (source.manifest) replaces the listing"
        yield Finding("warn", about, found, expected, advice)
    else:
        yield Finding("ok", about, f"{found}, {plural(facts.objects, 'object')} so far")


def _reads(facts: StoreFacts, about: str) -> Iterator[Finding]:
    if facts.first_byte_seconds is not None:
        yield Finding("ok", about, f"first byte in {_in_seconds(facts.first_byte_seconds)}")
    rates = []
    if facts.bytes_per_second is not None:
        rates.append(f"{in_bytes(facts.bytes_per_second)}/s")
    if facts.samples_per_second is not None:
        rates.append(f"{in_count(facts.samples_per_second)} samples/s")
    if rates:
        reads = plural(facts.concurrency, "read")
        yield Finding("ok", about, f"{', '.join(rates)} with {reads} in flight")


def _throttling(facts: StoreFacts, about: str) -> Iterator[Finding]:
    if facts.throttled_share > THROTTLED_SHARE and facts.trouble != "throttled":
        yield Finding(
            "wrong",
            about,
            f"it refused {in_percent(facts.throttled_share)} of the reads (503, 429 or no answer in time)",
            f"at most {in_percent(THROTTLED_SHARE)}",
            "lower sampling.concurrency or sampling.workers, spread keys over prefixes, or ask "
            "the provider for a higher limit; a service slows down by itself, but reads no "
            "faster",
        )


def _failures(facts: StoreFacts, about: str) -> Iterator[Finding]:
    for message, count in facts.failures.items():
        yield Finding(
            "wrong",
            about,
            f"{plural(count, 'read')} failed: {message}",
            "objects that can be read as listed",
            "each is a hole; above sampling.max_skipped the service stops",
        )
    for message, count in facts.unanswered.items():
        yield Finding(
            "wrong",
            about,
            f"{plural(count, 'read')} had no answer: {message}",
            "an answer to each read",
            "check the network and its proxies; a service retries, and is slower",
        )


def _skew(facts: StoreFacts, about: str) -> Iterator[Finding]:
    skew = facts.clock_skew_seconds
    if skew is None:
        return
    if abs(skew) <= SKEW_WARN_SECONDS:
        yield Finding("ok", about, f"its clock and this one differ by {abs(skew):.0f} s")
        return
    direction = "behind" if skew > 0 else "ahead of"
    yield Finding(
        "wrong" if abs(skew) > SKEW_WRONG_SECONDS else "warn",
        "clock",
        f"this machine's clock is {in_time(abs(skew))} {direction} the store's",
        f"at most {SKEW_WARN_SECONDS:.0f} s: stores refuse signatures that are 15 min off",
        "set the clock by NTP: timedatectl set-ntp true",
    )


def disk_findings(facts: DiskFacts) -> Iterator[Finding]:
    yield from _place(facts)
    yield from _room(facts)
    yield from _inodes(facts)
    yield from _disk_speed(facts)


def _place(facts: DiskFacts) -> Iterator[Finding]:
    if facts.foreign:
        yield Finding("wrong", "disk", facts.foreign, "a cache, or an empty folder")
    if not facts.may_write:
        yield Finding(
            "wrong",
            "disk",
            f"no permission to write into {facts.path}",
            "a folder that this user may write into",
            "change its owner or permissions, or choose another cache.path",
        )
    if facts.is_network:
        yield Finding(
            "warn" if facts.allows_network else "wrong",
            "disk",
            f"{facts.path} is on a network file system ({facts.file_system})",
            "a local disk: locks are not reliable over a network",
            "choose a cache.path on a local NVMe disk",
        )
    if facts.message:
        yield Finding("warn", "disk", facts.message)


def _room(facts: DiskFacts) -> Iterator[Finding]:
    if not facts.total_bytes:
        return
    room = max(0, facts.free_bytes - facts.min_free_bytes) + facts.held_bytes
    free = f"{in_bytes(facts.free_bytes)} free of {in_bytes(facts.total_bytes)} ({facts.file_system})"
    expected = f"room for cache.max_bytes {in_bytes(facts.max_bytes)}"
    if facts.min_free_bytes:
        expected += f" besides cache.min_free {in_bytes(facts.min_free_bytes)}"
    if room >= facts.max_bytes:
        yield Finding("ok", "disk", free)
        return
    wrong = room < min(LEAST_CACHE_BYTES, facts.max_bytes)
    advice = f"free {in_bytes(facts.max_bytes - room)}"
    if not wrong:
        advice += f", or set cache.max_bytes to {as_size(_two_digits_down(room))}"
    yield Finding("wrong" if wrong else "warn", "disk", free, expected, advice)


def _two_digits_down(value: int) -> int:
    """Return a number rounded down to two digits.

    >>> _two_digits_down(18_790_000_000), _two_digits_down(7)
    (18000000000, 7)
    """
    unit: int = 10 ** max(0, len(str(value)) - 2)
    return value // unit * unit


def _inodes(facts: DiskFacts) -> Iterator[Finding]:
    if facts.free_inodes is None:
        return
    needed = FILES_PER_SHARD * (facts.max_bytes // SHARD_BYTES + 100)
    if facts.free_inodes < needed:
        yield Finding(
            "warn" if facts.free_inodes > needed // 10 else "wrong",
            "disk",
            f"room for {in_count(facts.free_inodes)} files",
            f"about {in_count(needed)} (inodes: df -i)",
            "delete small files, or recreate the file system with more inodes",
        )


def _disk_speed(facts: DiskFacts) -> Iterator[Finding]:
    write, read = facts.write_bytes_per_second, facts.read_bytes_per_second
    if write is None:
        return
    slow = write < SLOW_DISK_BYTES_PER_SECOND
    found = f"writes {in_bytes(write)}/s"
    found += f", reads {in_bytes(read)}/s" if read else ""
    found += f" (in {facts.measured_in})" if slow and facts.measured_in else ""
    if slow:
        expected = f"at least {in_bytes(SLOW_DISK_BYTES_PER_SECOND)}/s"
        yield Finding("wrong", "disk", found, expected, "put cache.path on an NVMe disk")
    else:
        yield Finding("ok", "disk", found)
    sync = facts.sync_seconds
    if sync is not None and sync > SLOW_SYNC_SECONDS:
        yield Finding(
            "warn",
            "disk",
            f"a small synced write takes {_in_seconds(sync)}",
            f"at most {_in_seconds(SLOW_SYNC_SECONDS)}: each shard makes a few",
            "larger sampling.shard_samples make fewer; a local NVMe disk makes them quick",
        )


def machine_findings(facts: MachineFacts) -> Iterator[Finding]:
    yield from _node(facts)
    yield _memory(facts)
    yield _cores(facts)
    yield _files(facts)
    if facts.now < facts.installed_at - CLOCK_BACK_SECONDS:
        day = time.strftime("%Y-%m-%d", time.gmtime(facts.now))
        yield Finding(
            "wrong",
            "clock",
            f"it says {day}, before growcache was installed",
            "the present time",
            "set the clock by NTP: timedatectl set-ntp true",
        )
    if facts.versions:
        yield Finding(
            "ok", "versions", ", ".join(f"{k} {v}" for k, v in facts.versions.items())
        )


def _node(facts: MachineFacts) -> Iterator[Finding]:
    if facts.node:
        yield Finding("ok", "nodes", facts.node)
    if facts.node_trouble:
        found, _, advice = facts.node_trouble.partition("; ")
        expected = "a launcher that says the number of this machine and how many there are"
        yield Finding("wrong", "nodes", found, expected, advice)


def _memory(facts: MachineFacts) -> Finding:
    found = f"{in_bytes(facts.available_bytes)} available of {in_bytes(facts.memory_bytes)}"
    needs = f"about {in_bytes(facts.needed_bytes)} for {plural(facts.workers, 'sampler')}"
    if facts.needed_bytes <= facts.available_bytes:
        return Finding("ok", "memory", f"{found}; samplers need {needs}")
    level: Level = "wrong" if facts.needed_bytes > facts.memory_bytes else "warn"
    advice = "lower sampling.workers or sampling.concurrency, or give the container more memory"
    return Finding(level, "memory", found, needs, advice)


def _cores(facts: MachineFacts) -> Finding:
    found = f"{plural(facts.cores, 'core')} for {plural(facts.workers, 'sampler')}"
    if facts.workers_elsewhere:
        found += f", and {plural(facts.workers_elsewhere, 'sampler')} on Ray"
    if facts.workers <= facts.cores:
        return Finding("ok", "machine", found)
    expected = "at most one sampler per core"
    advice = (
        f"set sampling.workers to {facts.cores}; more reads in flight do not need more "
        "processes"
    )
    return Finding("warn", "machine", found, expected, advice)


def _files(facts: MachineFacts) -> Finding:
    needed = facts.concurrency + OTHER_FILES
    found = f"a process may have {in_count(facts.files_limit)} files open"
    if facts.files_limit >= max(needed, ENOUGH_FILES):
        return Finding("ok", "machine", found)
    wanted = max(2 * needed, 4 * ENOUGH_FILES)
    advice = f"raise it before the service starts: ulimit -n {wanted}"
    if facts.files_hard_limit < wanted:
        advice += ", which needs a higher hard limit (limits.conf, LimitNOFILE, --ulimit)"
    level: Level = "wrong" if facts.files_limit < needed else "warn"
    expected = f"{needed} for {plural(facts.concurrency, 'read')} in flight"
    return Finding(level, "machine", found, f"{expected}, rather {ENOUGH_FILES}", advice)


def training_findings(facts: TrainingFacts) -> Iterator[Finding]:
    if facts.service_runs:
        drawn = f"{in_count(facts.drawn_per_second)} samples/s"
        shared = "so the reads of this measurement had only a part of the link"
        yield Finding(
            "ok", "service", f"runs on the cache and drew {drawn} meanwhile, {shared}"
        )
    if facts.consumed_per_second is None:
        return
    rate = f"{in_count(facts.consumed_per_second)} samples/s"
    if facts.given:
        yield Finding("ok", "training", f"consumes {rate}, as --consume says")
        return
    found = f"job {facts.job} consumes {rate}"
    if facts.wait_share is not None:
        found += f" and waits for batches {in_percent(facts.wait_share)} of the time"
    yield Finding("ok", "training", found)


def _in_seconds(seconds: float) -> str:
    """Return a short time in words.

    >>> _in_seconds(0.0004), _in_seconds(0.0512), _in_seconds(3.21)
    ('0.4 ms', '51 ms', '3.2 s')
    """
    if seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
