"""Servers for every test that needs one; each starts once, when first asked for."""

from __future__ import annotations

import contextlib
import gc
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from growcache import secrecy

# The servers run as processes that import their programs from here.
sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.servers import Bucket, S3Server
from tests.servers.azure import Azure, azurite
from tests.servers.azure import missing as azure_missing
from tests.servers.ceph import ceph, missing
from tests.servers.gcs import gcs
from tests.servers.gcs import missing as gcs_missing
from tests.servers.moto import moto
from tests.servers.sftp import Ssh, sshd
from tests.servers.sftp import missing as sftp_missing
from tests.servers.slowlink import SlowLink
from tests.servers.slowlink import slowlink as running_slowlink

# Until all is imported: to look for garbage in it is in vain, and takes a tenth of that time.
gc.disable()

# How long an example may take says nothing on a machine that does other things as well; each
# test as a whole has its time limit.
settings.register_profile("growcache", deadline=None)
# For `make test`, which shall end soon; `make test-all` looks for longer.
settings.register_profile("quick", settings.get_profile("growcache"), max_examples=15)
settings.load_profile("growcache")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests write the tables of the documentation; see `tests.tables`."""
    parser.addoption("--write-tables", action="store_true", help="write the tables of docs/")


# Few tests that take long: they start first, because a worker that started them last would end last.
LONG = ("tests/accidents", "tests/test_examples", "tests/end_to_end", "tests/golden")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that all workers end at about one time."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.fixture(scope="session")
def write_tables(request: pytest.FixtureRequest) -> bool:
    """Whether tables are written rather than compared."""
    return bool(request.config.getoption("--write-tables"))


@pytest.fixture(autouse=True)
def no_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's secret hides a word of another test's message."""
    monkeypatch.setattr(secrecy, "_known", set[str]())
    monkeypatch.setattr(secrecy, "_pattern", None)


def loading_threads() -> set[threading.Thread]:
    """Threads of loaders that were neither closed nor collected."""
    return {thread for thread in threading.enumerate() if thread.name == "growcache-loader"}


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """No test leaves a loader behind, or a later one may be told that it did."""
    before = loading_threads()
    yield
    if loading_threads() - before:
        gc.collect()  # an error's traceback may hold its loader
    deadline = (
        time.monotonic() + 300
    )  # a loader that its own thread collects ends a little later
    while loading_threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    if loading_threads() - before:
        pytest.fail(f"A loader was left behind:\n{stacks()}")


def stacks() -> str:
    """Return where growcache's threads are."""
    frames, found = sys._current_frames(), list[str]()
    for thread in threading.enumerate():
        if thread.name.startswith("growcache") and thread.ident in frames:
            found += [f"{thread.name}\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(found)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name does not lengthen messages, so that none of them is shortened."""
    folder = Path(tempfile.mkdtemp(prefix="g-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """S3 for the everyday suite."""
    with moto() as server:
        yield server


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[S3Server]:
    """S3 to conform to; skipped, with the reason, where it is not installed."""
    if reason := missing():
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="ceph-", dir="/tmp"))
    try:
        with ceph(root) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def ssh_server() -> Iterator[Ssh]:
    """SFTP; skipped, with the reason, where OpenSSH or asyncssh is not installed."""
    if reason := sftp_missing():
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="ssh-", dir="/tmp"))
    try:
        with sshd(root) as server:
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """Google's API as fake-gcs-server has it; skipped where it is not installed."""
    if reason := gcs_missing():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch, gcs() as endpoint:
        # Or gcsfs asks Google about the bucket for a minute.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield endpoint


@pytest.fixture(scope="session")
def azure_server() -> Iterator[Azure]:
    """Microsoft's own emulator; skipped, with the reason, where it is not installed."""
    if reason := azure_missing():
        pytest.skip(reason)
    with azurite() as server:
        yield server


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.ceph)])
def s3(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A fresh bucket on each S3 server."""
    bucket = Bucket.make(request.getfixturevalue(f"{request.param}_server"))
    yield bucket
    bucket.remove()


@pytest.fixture
def bucket(moto_server: S3Server) -> Iterator[Bucket]:
    """A fresh bucket on the everyday server."""
    bucket = Bucket.make(moto_server)
    yield bucket
    bucket.remove()


@pytest.fixture
def slowlink() -> Iterator[Callable[..., SlowLink]]:
    """Starts proxies: ``slowlink(endpoint, latency_seconds=0.05)``; they end with the test."""
    with contextlib.ExitStack() as open_links:
        yield lambda endpoint, **faults: open_links.enter_context(
            running_slowlink(endpoint, **faults)
        )


def pytest_collection_finish() -> None:
    """Have the collector pass over all that was imported: it stays, and tests collect often."""
    gc.collect()
    gc.freeze()
    gc.enable()
