"""Measure the resources of a service: stores, disk, machine, and a running training job."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import IO

from growcache.cache.directory import is_cache
from growcache.cache.files import (
    NETWORK_FILE_SYSTEMS,
    CacheLayout,
    allocated_tree,
    file_system_of,
)
from growcache.cache.folders import NOT_COUNTED
from growcache.cache.status import read_status
from growcache.cache.status_model import JobStatus, Status
from growcache.cache.system import available_memory_bytes, memory_bytes
from growcache.config import CacheConfig, Config
from growcache.errors import CacheError, CacheMissingError, ConfigError
from growcache.launcher import launched_node, with_launched_node
from growcache.monitor.doctor_facts import (
    DiskFacts,
    DoctorFacts,
    MachineFacts,
    StoreFacts,
    TrainingFacts,
    needed_memory_bytes,
)
from growcache.monitor.doctor_store import measure_store
from growcache.monitor.doctor_visits import needs_visits, with_visits
from growcache.monitor.versions import library_versions

WRITE_SECONDS, READ_SECONDS = 2.0, 2.0
CHUNK_BYTES = 4 << 20
MOST_WRITTEN_BYTES = 256 << 20
SHARE_OF_FREE = 4  # a test takes at most a fourth of the room on the disk
SYNCS = 5
LEAST_WATCHED_SECONDS = 4.0  # of a running job
CGROUP = Path("/sys/fs/cgroup")


def measure(
    config: Config,
    consume: float | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> DoctorFacts:
    """Measure everything. ``consume`` replaces a running job, in samples per second."""
    config, node, node_trouble = as_launched(config)
    before, began = _status(config.cache.path), time.monotonic()
    weights = config.weights or (1.0,)
    stores = []
    for source, weight in zip(config.sources, weights, strict=True):
        on_step(f"reading from {source.url[0] if source.dataset is None else source.dataset}")
        stores.append(measure_store(config, source, weight / sum(weights)))
    if needs_visits(config, stores):
        on_step("making visits as samplers do")
        stores = [with_visits(config, stores[0])]
    on_step(f"writing next to {config.cache.path}")
    disk = measure_disk(config.cache)
    if before is not None and consume is None and any(job.open for job in before.jobs):
        on_step("watching the job that runs")
        time.sleep(max(0.0, LEAST_WATCHED_SECONDS - (time.monotonic() - began)))
    elapsed = time.monotonic() - began
    limit = config.sampling.max_bytes_per_second
    return DoctorFacts(
        tuple(stores),
        disk,
        replace(measure_machine(config, stores), node=node, node_trouble=node_trouble),
        training_facts(before, _status(config.cache.path), elapsed, consume),
        None if limit is None else int(limit),
    )


def as_launched(config: Config) -> tuple[Config, str, str]:
    """Return the configuration with the launcher's numbers, its words, and its error.

    Without a launcher the source is measured as for a single machine.
    """
    try:
        found = launched_node(config)
        return with_launched_node(config), "" if found is None else found.words, ""
    except ConfigError as error:
        alone = config.sampling.model_copy(update={"nodes": 1})
        return config.model_copy(update={"sampling": alone}), "", str(error)


def _status(path: Path) -> Status | None:
    try:
        return read_status(path)
    except CacheMissingError:
        return None
    except (CacheError, OSError):  # `measure_disk` reports errors of the folder
        return None


def training_facts(
    before: Status | None, after: Status | None, seconds: float, consume: float | None
) -> TrainingFacts:
    """Return the consumption of the fastest living job between two looks at a cache."""
    facts = TrainingFacts(
        service_runs=after is not None and after.state != "stopped",
        drawn_per_second=_drawn_between(before, after) / max(seconds, 1e-9),
        waiting_for=(after.waiting_for or "") if after is not None else "",
    )
    if consume is not None:
        return replace(facts, consumed_per_second=consume, given=True)
    if before is None or after is None or seconds <= 0:
        return facts
    then = {job.name: job for job in before.jobs}
    rates = [
        ((job.delivered - then[job.name].delivered) / seconds, job)
        for job in after.jobs
        if job.open and job.name in then
    ]
    rate, job = max(rates, key=lambda one: one[0], default=(0.0, None))
    if job is None or rate <= 0:
        return facts
    waited = (job.waits.seconds - then[job.name].waits.seconds) / (
        seconds * _readers(after, job)
    )
    return replace(
        facts, consumed_per_second=rate, job=job.name, wait_share=min(1.0, max(0.0, waited))
    )


def _drawn_between(before: Status | None, after: Status | None) -> int:
    return 0 if before is None or after is None else max(0, after.drawn - before.drawn)


def _readers(status: Status, job: JobStatus) -> int:
    return max(1, status.loop_count(job.name))


def measure_disk(config: CacheConfig) -> DiskFacts:
    """Measure the disk of a cache.

    Nothing is written into the cache, and no file keeps a name.
    """
    path = config.path.absolute()
    existing = next(p for p in (path, *path.parents) if _is_folder(p))
    kind = _file_system(existing)
    facts = DiskFacts(
        str(path),
        may_write=os.access(existing, os.W_OK | os.X_OK),
        foreign=_foreign(path),
        file_system=kind,
        is_network=kind in NETWORK_FILE_SYSTEMS,
        allows_network=config.allow_network_filesystem,
        max_bytes=int(config.max_bytes),
        held_bytes=allocated_tree(path) if existing == path else 0,
    )
    room = os.statvfs(existing)
    total = room.f_blocks * room.f_frsize
    least = config.min_free
    facts = replace(
        facts,
        total_bytes=total,
        free_bytes=room.f_bavail * room.f_frsize,
        min_free_bytes=int(least * total) if isinstance(least, float) else int(least),
        free_inodes=room.f_favail if room.f_files else None,
    )
    return _with_speed(facts, path.resolve(), existing.resolve())


def _is_folder(path: Path) -> bool:
    """Whether a folder exists that this user may see.

    `Path.is_dir` would raise if a parent hides it.
    """
    with suppress(OSError):
        return path.is_dir()
    return False


def _file_system(path: Path) -> str:
    try:
        return file_system_of(path)
    except OSError:
        return "unknown"


def _foreign(path: Path) -> str:
    """Return why a folder cannot become a cache, or ""."""
    try:
        for part in (path, *path.parents):
            if part.exists() and not part.is_dir():
                return f"{part} is a file"
        found = path.iterdir() if path.is_dir() else ()
        names = sorted({one.name for one in found} - NOT_COUNTED)
        if names and not is_cache(CacheLayout(path)):
            return f"{path} is not a growcache cache, and is not empty (it holds {names[0]!r})"
    except CacheError as error:
        return str(error)
    except OSError:  # `may_write` reports it
        return ""
    return ""


def _with_speed(facts: DiskFacts, path: Path, existing: Path) -> DiskFacts:
    most = (facts.free_bytes - facts.min_free_bytes) // SHARE_OF_FREE
    if most < CHUNK_BYTES:
        return facts  # the lack of room is the finding
    folder, nameless = existing, False
    if path == existing:
        # A cache that is a mount of its own has no other folder on its disk. A file without a
        # name is in no directory, so it is not part of the cache.
        nameless = path.parent.stat().st_dev != path.stat().st_dev
        folder = path if nameless else path.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        unmeasured = (
            f"no permission to write into {folder}, so the disk's speed is not measured"
        )
        return replace(facts, message=unmeasured)
    try:
        with _temporary_file(folder, nameless=nameless) as file:
            return _timed(replace(facts, measured_in=str(folder)), file.fileno(), most)
    except OSError as error:
        return replace(facts, message=f"its speed is not measured: {folder}: {error.strerror}")


def _temporary_file(folder: Path, *, nameless: bool) -> IO[bytes]:
    """Open a file without a name, which the kernel removes even after kill -9."""
    if nameless:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), "w+b", buffering=0)
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _timed(facts: DiskFacts, descriptor: int, most: int) -> DiskFacts:
    chunk = os.urandom(CHUNK_BYTES)  # cannot be compressed by a file system
    most = min(most, MOST_WRITTEN_BYTES)
    began, written, synced_at = time.monotonic(), 0, CHUNK_BYTES
    while written + CHUNK_BYTES <= most:
        written += os.pwrite(descriptor, chunk, written)
        if written >= synced_at:  # at growing intervals, so that a slow disk is noticed early
            os.fdatasync(descriptor)
            synced_at *= 2
            if time.monotonic() - began > WRITE_SECONDS:
                break
    os.fdatasync(descriptor)
    write = written / (time.monotonic() - began)
    return replace(
        facts,
        written_bytes=written,
        write_bytes_per_second=write,
        read_bytes_per_second=_read_rate(descriptor, written),
        sync_seconds=_sync_seconds(descriptor),
    )


def _read_rate(descriptor: int, nbytes: int) -> float:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    began, at = time.monotonic(), 0
    while at < nbytes and time.monotonic() - began < READ_SECONDS:
        at += len(os.pread(descriptor, CHUNK_BYTES, at)) or nbytes
    return at / max(time.monotonic() - began, 1e-6)


def _sync_seconds(descriptor: int) -> float:
    found = []
    for number in range(SYNCS):
        began = time.monotonic()
        os.pwrite(descriptor, b"x" * 4096, 4096 * number)
        os.fdatasync(descriptor)
        found.append(time.monotonic() - began)
    return median(found)


def measure_machine(config: Config, stores: list[StoreFacts]) -> MachineFacts:
    sampling = config.sampling
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (1 << 20 if one == resource.RLIM_INFINITY else one for one in (soft, hard))
    return MachineFacts(
        cores=core_count(),
        workers=sampling.workers,
        workers_elsewhere=sampling.samplers_elsewhere,
        concurrency=sampling.concurrency,
        memory_bytes=memory_bytes(),
        available_bytes=available_memory_bytes(),
        needed_bytes=needed_memory_bytes(
            workers=sampling.workers,
            concurrency=sampling.concurrency,
            max_bytes=int(config.cache.max_bytes),
            read_bytes=max((one.read_bytes for one in stores), default=0),
            samples_per_read=max((one.samples_per_read for one in stores), default=1.0),
        ),
        files_limit=soft,
        files_hard_limit=hard,
        now=time.time(),
        installed_at=Path(__file__).stat().st_mtime,
        versions={**library_versions(), platform.system(): platform.release()},
    )


def core_count(group: Path = CGROUP) -> int:
    """Return the cores that this process may use, by its affinity and a container's quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return max(1, min(cores, -(-int(quota) // int(period))))  # "max" is no number
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota_us = int((group / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((group / "cpu/cpu.cfs_period_us").read_text())
        if quota_us > 0:
            return max(1, min(cores, -(-quota_us // period_us)))
    return cores
