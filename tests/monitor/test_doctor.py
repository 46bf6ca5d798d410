"""Findings and limits are functions of what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.status_model import JobStatus, LeaseStatus, Status, WaitsStatus
from growcache.monitor.doctor import Finding, find_all
from growcache.monitor.doctor_facts import (
    DiskFacts,
    DoctorFacts,
    MachineFacts,
    StoreFacts,
    TrainingFacts,
)
from growcache.monitor.doctor_limits import drawn_per_second, find_limit
from growcache.monitor.doctor_measure import training_facts

GB = 10**9
STORE = StoreFacts(
    "s3://b/*.npy",
    listing_seconds=0.2,
    objects=1000,
    first_byte_seconds=0.05,
    read_seconds=0.06,
    loaded_read_seconds=0.06,
    concurrency=32,
    reads=2000,
    bytes=200_000_000,
    seconds=4.0,
    samples=2000.0,
    sample_bytes=100_000.0,
    clock_skew_seconds=0.0,
)
DISK = DiskFacts(
    "/data/cache",
    file_system="ext4",
    write_bytes_per_second=1e9,
    read_bytes_per_second=2e9,
    sync_seconds=0.001,
    free_bytes=500 * GB,
    total_bytes=1000 * GB,
    max_bytes=100 * GB,
    free_inodes=10**7,
)
MACHINE = MachineFacts(
    cores=8,
    workers=2,
    concurrency=16,
    memory_bytes=16 * GB,
    available_bytes=8 * GB,
    needed_bytes=GB,
    files_limit=1024,
    files_hard_limit=4096,
    now=2e9,
    installed_at=1.9e9,
)
FACTS = DoctorFacts((STORE,), DISK, MACHINE)


def with_store(**changes: Any) -> DoctorFacts:
    return replace(FACTS, stores=(replace(STORE, **changes),))


def with_disk(**changes: Any) -> DoctorFacts:
    return replace(FACTS, disk=replace(DISK, **changes))


def with_machine(**changes: Any) -> DoctorFacts:
    return replace(FACTS, machine=replace(MACHINE, **changes))


def bad(facts: DoctorFacts) -> list[Finding]:
    return [one for one in find_all(facts) if one.level != "ok"]


def test_a_healthy_machine_has_no_findings() -> None:
    assert bad(FACTS) == []


@pytest.mark.parametrize(
    ("facts", "level", "about", "words"),
    [
        (with_store(trouble="refused", message="403"), "wrong", "store", "credentials"),
        (
            with_store(trouble="unreachable", message="refused by h:1"),
            "wrong",
            "store",
            "network",
        ),
        (with_store(throttled=200), "wrong", "store", "503"),
        (with_store(failures={"a.npy is gone (404)": 7}), "wrong", "store", "7 reads failed"),
        (with_store(clock_skew_seconds=400.0), "wrong", "clock", "6 min 40 s behind"),
        (with_store(clock_skew_seconds=-90.0), "warn", "clock", "ahead of"),
        (with_store(listing_seconds=30.0), "warn", "store", "manifest"),
        (with_disk(may_write=False), "wrong", "disk", "no permission to write"),
        (with_disk(is_network=True, file_system="nfs4"), "wrong", "disk", "nfs4"),
        (with_disk(is_network=True, allows_network=True), "warn", "disk", "network"),
        (with_disk(write_bytes_per_second=20e6), "wrong", "disk", "20.0 MB/s"),
        (with_disk(sync_seconds=0.4), "warn", "disk", "400 ms"),
        (with_disk(free_bytes=30 * GB), "warn", "disk", "set cache.max_bytes to 30GB"),
        (with_disk(free_bytes=0), "wrong", "disk", "free 100 GB"),
        (with_disk(free_inodes=100), "wrong", "disk", "inodes"),
        (with_disk(foreign="/data/cache is a file"), "wrong", "disk", "is a file"),
        (with_machine(files_limit=64), "wrong", "machine", "ulimit -n 4096"),
        (with_machine(files_limit=512), "warn", "machine", "512 files"),
        (with_machine(needed_bytes=12 * GB), "warn", "memory", "sampling.workers"),
        (with_machine(needed_bytes=20 * GB), "wrong", "memory", "20.0 GB"),
        (with_machine(workers=16), "warn", "machine", "sampling.workers to 8"),
        (with_machine(now=0.0), "wrong", "clock", "1970-01-01"),
        (
            with_machine(node_trouble="found neither torchrun nor Slurm; set both"),
            "wrong",
            "nodes",
            "set both",
        ),
    ],
)
def test_each_trouble_is_found_with_what_to_do(
    facts: DoctorFacts, level: str, about: str, words: str
) -> None:
    (found,) = bad(facts)
    assert (found.level, found.about) == (level, about)
    assert words in f"{found.found} {found.expected} {found.advice}"
    assert found.expected
    assert found.advice or about == "disk"


def test_samplers_on_ray_are_not_counted_among_those_of_this_machine() -> None:
    machine = with_machine(workers=1, workers_elsewhere=4)
    (found,) = (one.found for one in find_all(machine) if "core" in one.found)
    assert found == "8 cores for 1 sampler, and 4 samplers on Ray"
    busy = replace(STORE, cpu_share=1.0)
    facts = replace(machine, stores=(busy,))
    assert drawn_per_second(facts) == 5 * 500.0  # of one process
    assert find_limit(facts).advice == "raise sampling.ray.workers"


def test_a_lower_hard_limit_is_named() -> None:
    (found,) = bad(with_machine(files_limit=64, files_hard_limit=64))
    assert "hard limit" in found.advice


@pytest.mark.parametrize(
    ("facts", "resource"),
    [
        (FACTS, "latency"),  # reads among others take as long as one alone
        (with_store(loaded_read_seconds=0.4), "link"),
        (with_store(cpu_share=0.99), "cpu"),
        (with_store(cpu_share=0.6, first_byte_seconds=0.001), "cpu"),
        (with_store(loaded_read_seconds=0.4, first_byte_seconds=0.001), "link"),
        (with_store(throttled=500), "throttling"),
        (with_disk(write_bytes_per_second=1e6), "disk"),
        (replace(FACTS, max_bytes_per_second=10**6), "setting"),
        (with_store(trouble="refused"), "unknown"),
        (with_store(bytes=0, samples=None), "unknown"),
    ],
)
def test_what_limits_a_cache_that_fills(facts: DoctorFacts, resource: str) -> None:
    found = find_limit(facts)
    assert found.resource == resource
    assert found.advice or resource == "unknown"


@pytest.mark.parametrize(
    ("consumed", "changes", "resource", "words"),
    [
        (100.0, {}, "training", "training limits"),
        (1500.0, {}, "training", "3.0 times"),
        (10_000.0, {}, "latency", "20.0 times"),
        (100_000.0, {}, "disk", "waits for the disk"),  # 10 GB/s
    ],
)
def test_what_limits_training(
    consumed: float, changes: dict[str, object], resource: str, words: str
) -> None:
    facts = replace(FACTS, training=TrainingFacts(consumed, given=True))
    found = find_limit(facts)
    assert (found.resource, found.supply) == (resource, 500.0)
    assert words in found.text


@pytest.mark.parametrize(("waiting", "resource"), [("", "loader"), ("the store", "setting")])
def test_a_loop_that_waits(waiting: str, resource: str) -> None:
    training = TrainingFacts(100.0, job="a", wait_share=0.4, waiting_for=waiting)
    assert find_limit(replace(FACTS, training=training)).resource == resource


def test_a_service_that_runs_has_the_rest_of_the_link() -> None:
    facts = replace(FACTS, training=TrainingFacts(service_runs=True, drawn_per_second=100.0))
    assert drawn_per_second(facts) == 600.0
    assert [one.about for one in find_all(facts) if "drew 100 samples/s" in one.found] == [
        "service"
    ]


def test_mixed_sources_are_as_fast_as_the_slowest_for_its_share() -> None:
    fast, slow = replace(STORE, share=0.5), replace(STORE, share=0.5, samples=200.0)
    assert drawn_per_second(replace(FACTS, stores=(fast, slow))) == 100.0


@given(
    samples=st.floats(1, 1e6),
    consumed=st.floats(1, 1e7),
    limit=st.none() | st.integers(1, 10**9),
    write=st.floats(1e3, 1e10),
    cpu=st.floats(0, 1),
)
def test_the_supply_is_bounded_by_every_resource(
    samples: float, consumed: float, limit: int | None, write: float, cpu: float
) -> None:
    facts = replace(
        with_store(samples=samples, cpu_share=cpu),
        max_bytes_per_second=limit,
        disk=replace(DISK, write_bytes_per_second=write),
        training=TrainingFacts(consumed),
    )
    supply, found = drawn_per_second(facts), find_limit(facts)
    assert supply is not None
    assert supply <= 2 * samples / 4.0 * 1.001
    assert supply <= write / 100_000 * 1.001
    assert limit is None or supply <= limit / (STORE.bytes / samples) * 1.001
    assert found.reuse is None or found.reuse == pytest.approx(consumed / supply)


def at(delivered: int, waited: float, *pids: int) -> Status:
    job = JobStatus("a", delivered, 1.0, 1, 7, WaitsStatus(1, waited), open=True)
    leases = [
        LeaseStatus(str(n), "a", "h", pid, "", 1.0, 1, True, pid_namespace=n)
        for n, pid in enumerate(pids)
    ]
    return Status(state="running", jobs=[job], leases=leases, drawn=delivered * 3 // 20)


def test_a_jobs_consumption_is_seen_between_two_looks() -> None:
    found = training_facts(at(1000, 1.0, 7, 7), at(3000, 3.0, 7, 7), 10.0, None)
    # Of two containers of one pod, in which the ranks have the same pid.
    assert (found.consumed_per_second, found.wait_share) == (200.0, 0.1)
    assert (found.job, found.service_runs, found.drawn_per_second) == ("a", True, 30.0)
    assert training_facts(None, at(3000, 3.0), 10.0, None).consumed_per_second is None
    assert training_facts(None, None, 10.0, 55.0).given
