"""Pids repeat in containers: each has a process 1, and those of a Kubernetes pod have one host name."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from growcache.cache import locks
from growcache.cache.lease_views import ReaderProcess
from growcache.cache.locks import are_pids_ours, lock_holder, pid_namespace
from growcache.cache.status import read_status, service_pulse, service_silence, write_status
from growcache.cache.status_model import Status
from growcache.loading.snapshot import Snapshot
from tests.filled import Filled, open_leases

HERE = socket.gethostname()
NO_PROCESS = 1 << 30


@pytest.mark.parametrize(
    ("host", "namespace", "ours"),
    [
        (HERE, pid_namespace(), True),
        (HERE, None, True),  # an earlier version wrote it
        (HERE, pid_namespace() + 1, False),
        ("elsewhere", pid_namespace(), False),
    ],
)
def test_a_process_is_looked_up_only_where_its_pid_is_its_own(
    host: str, namespace: int | None, ours: bool
) -> None:
    assert are_pids_ours(host, namespace) == ours
    assert ReaderProcess(host, NO_PROCESS, namespace).has_ended == ours
    assert not ReaderProcess(host, os.getpid(), namespace).has_ended


def test_leases_and_locks_say_whose_pids_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Filled(tmp_path / "cache") as filled:
        filled.add(0)
        with Snapshot.take(filled.root):
            (lease,) = open_leases(filled.root)
            assert lease.process == ReaderProcess(HERE, os.getpid(), pid_namespace())
        assert lock_holder(filled.layout.supervisor_lock)["pid_namespace"] == pid_namespace()
    monkeypatch.setattr(locks, "PID_NAMESPACE", tmp_path / "none")
    assert pid_namespace() == 0


def test_the_status_of_a_service_with_the_same_pid_before_is_not_that_of_this_one(
    tmp_path: Path,
) -> None:
    long_ago = time.time() - 3600
    before = Status(
        "waiting",
        "the store",
        pid=os.getpid(),
        started_at=long_ago,
        updated_at=long_ago,
        drawn=7,
    )
    with Filled(tmp_path / "cache") as filled:  # which holds the lock from now on
        filled.add(0)
        write_status(filled.root, before)
        found, pulse = read_status(filled.root), service_pulse(filled.root)
        assert (found.state, found.waiting_for, found.drawn) == ("running", None, 10)
        assert (pulse.runs, pulse.state, pulse.silence) == (True, "running", "")
        assert service_silence(filled.root) == ""
