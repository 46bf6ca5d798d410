"""What engines decide without a process: copies of permits, bytes in flight, versions, the user's code."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.config_ray import RayConfig
from growcache.config_text import load_config
from growcache.errors import ConfigError
from growcache.sampling.engines.in_flight import InFlightBytes
from growcache.sampling.engines.library_versions import VersionTable, installed_versions
from growcache.sampling.engines.permit_copies import (
    LEAST_REMEMBERED,
    LEAST_SLOW_SECONDS,
    SLOW_FACTOR,
    PermitCopies,
    ShardOutcome,
)
from growcache.sampling.engines.ray_engine import RayEngine, RaySampler, WriterProcess
from growcache.sampling.engines.sent_code import send_code
from growcache.sampling.messages import Message
from growcache.usercode import SENT_CODE, find_code


def copies_after(seconds: float) -> PermitCopies:
    """Return copies of which each permit so far took some seconds."""
    copies = PermitCopies()
    for number in range(LEAST_REMEMBERED):
        copies.given({"id": f"p{number}"}, 0, 0.0)
        copies.arrived(f"p{number}", 0, seconds)
        copies.over(f"p{number}", 0)
    return copies


@pytest.mark.parametrize("seconds", [0.1, LEAST_SLOW_SECONDS, 100.0])
def test_a_permit_is_slow_compared_with_others(seconds: float) -> None:
    copies = copies_after(seconds)
    copies.given({"id": "a"}, 1, 0.0)
    patience = max(LEAST_SLOW_SECONDS, SLOW_FACTOR * seconds)
    assert not copies.slow(patience)
    (slow,) = copies.slow(patience + 1)
    slow.slots.add(2)
    assert not copies.slow(patience + 1)  # one copy is enough


def test_without_others_no_permit_is_slow() -> None:
    copies = PermitCopies()
    copies.given({"id": "a"}, 1, 0.0)
    assert not copies.slow(1e6)


def two_copies() -> PermitCopies:
    copies = copies_after(1.0)
    copies.given({"id": "a"}, 1, 0.0)
    (slow,) = copies.slow(60.0)
    slow.slots.add(2)
    return copies


def test_the_first_copy_to_arrive_speaks_for_the_permit() -> None:
    copies = two_copies()
    assert [copies.arrived("a", slot, 60.0) for slot in (2, 1, 2)] == [
        "first",
        "later",
        "first",
    ]
    known = copies.of("a")
    assert known is not None
    assert (known.owner, known.speaker) == (1, 2)
    copies.over("a", 2)
    assert known.is_over
    copies.over("a", 1)
    assert copies.of("a") is None
    assert copies.arrived("a", 1, 60.0) == "unknown"


def outcome(digest: str, samples: int = 64) -> list[ShardOutcome]:
    return [ShardOutcome(7, (samples,), digest)]


def test_copies_that_drew_alike_have_equal_bytes() -> None:
    copies = two_copies()
    assert copies.compared("a", 1, outcome("aa")) is None
    assert copies.compared("a", 2, outcome("aa")) is None
    copies = two_copies()
    copies.compared("a", 1, outcome("aa"))
    assert copies.compared("a", 2, outcome("bb", samples=63)) is None  # an object failed
    assert copies.compared("a", 2, outcome("bb")) == (1, [7])


def test_a_group_that_was_cut_is_not_compared() -> None:
    copies = two_copies()
    known = copies.of("a")
    assert known is not None
    known.is_cut = True
    copies.compared("a", 1, outcome("aa"))
    assert copies.compared("a", 2, outcome("bb")) is None


@pytest.mark.parametrize(
    ("first", "ends", "lost", "known"),
    [
        (None, 1, 0, False),  # the supervisor gives up the permits of a slot that ended
        (None, 2, 0, True),
        (2, 1, 0, False),
        (2, 2, 1, False),  # which it cannot know of: it had given the permit to 1
        (1, 2, 0, True),
    ],
)
def test_the_end_of_a_copy(first: int | None, ends: int, lost: int, known: bool) -> None:
    copies = two_copies()
    if first is not None:
        copies.arrived("a", first, 60.0)
    assert len(copies.slot_ended(ends)) == lost
    assert (copies.of("a") is not None) == known


@given(st.lists(st.integers(1, 10), max_size=30), st.integers(10, 20))
def test_bytes_in_flight_stay_within_their_bound_and_all_get_their_turn(
    sizes: list[int], most: int
) -> None:
    async def carry(in_flight: InFlightBytes, nbytes: int, done: list[int]) -> None:
        async with in_flight.room(nbytes):
            assert in_flight.used <= most
            await asyncio.sleep(0)
        done.append(nbytes)

    async def carry_all() -> list[int]:
        in_flight, done = InFlightBytes(most), list[int]()
        await asyncio.gather(*(carry(in_flight, nbytes, done) for nbytes in sizes))
        assert in_flight.used == 0
        return done

    assert sorted(asyncio.run(carry_all())) == sorted(sizes)


def test_who_no_longer_waits_holds_no_bytes() -> None:
    async def cancelled() -> int:
        in_flight = InFlightBytes(10)
        async with in_flight.room(10):
            waiting = asyncio.create_task(in_flight.room(5).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with in_flight.room(10):
            pass
        return in_flight.used

    assert asyncio.run(cancelled()) == 0


class Deaf(WriterProcess):
    """A writer that is not there."""

    def __init__(self) -> None:
        super().__init__(lambda notice: None, lambda: None)

    def send(self, message: Message) -> None:
        """Lose it."""


def test_a_sampler_is_not_heard_before_it_can_be_answered() -> None:
    async def heard() -> list[list[Message]]:
        found: list[Message] = []
        sampler = RaySampler(0, Deaf(), found.append)
        sampler.note_start(7, "node")
        sampler.receive({"type": "ready"})
        before = list(found)
        sampler.pass_on_held()
        sampler.receive({"type": "progress"})
        return [before, found]

    assert asyncio.run(heard()) == [[], [{"type": "ready"}, {"type": "progress"}]]


def test_versions_that_are_unknown_here_are_compared_between_nodes() -> None:
    table = VersionTable()
    assert table.differences("here", {"numpy": "2.1"}) == []
    assert table.differences("a", {"numpy": "2.1", "h5py": "3.14"}) == []
    (found,) = table.differences("b", {"h5py": "3.13"})
    assert found == "h5py is 3.14 on a and 3.13 on b"
    assert {"numpy", "h5py"} <= installed_versions().keys()


MODULE = """
from on_its_way_to_ray.tools import twice

def transform(sample):
    return {"x": twice(sample["x"])}
"""
USE = """
import pickle, sys
from pathlib import Path
code = pickle.loads(Path(sys.argv[1]).read_bytes())
from growcache.usercode import find_code
with code.adopted():
    found = find_code("on_its_way_to_ray.main:transform", "sampling.transform")
print(found.found({"x": 2}), found.digest.text)
"""


def test_code_of_a_package_that_a_node_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "here" / "on_its_way_to_ray"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").write_text(MODULE)
    (package / "tools.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(package.parent))
    name = "on_its_way_to_ray.main:transform"
    config = load_config({"source": {"url": "a"}, "sampling": {"transform": name}})
    import pickle

    (tmp_path / "code").write_bytes(pickle.dumps(send_code(config)))
    there = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path / "code")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == ["{'x':", "4}", find_code(name, "").digest.text]
    assert not SENT_CODE


SECRET = {"source": {"url": "s3://b/*", "storage_options": {"key": "AKIAIOSFODNN7EXAMPLE"}}}


def test_credentials_are_not_sent_to_nodes() -> None:
    load_config(SECRET)
    with pytest.raises(ConfigError, match=r"source\.storage_options\.key: .*environment"):
        load_config({**SECRET, "sampling": {"engine": "ray"}})
    transform = {"transform": "m:f", "transform_options": {"token": "9mmFyp+4Zk1q"}}
    with pytest.raises(ConfigError, match=r"sampling\.transform_options\.token: "):
        load_config({"source": {"url": "a"}, "sampling": {"engine": "ray", **transform}})


def test_a_wait_for_the_cluster_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also where no one looks at the status: stdout of a unit of systemd is dropped."""
    engine = RayEngine(RayConfig(), {}, lambda error: None)
    for event in ("Ray to answer (refused)", "Ray to answer (timed out)", "", "a node"):
        engine._noticed({"type": "waiting", "event": event})
        assert engine.waiting_for == event
    said = [
        f"samplers on Ray wait for {event}" for event in ("Ray to answer (refused)", "a node")
    ]
    assert caplog.messages == said


@pytest.mark.parametrize("address", ["auto", "local", "head:6379", "10.0.0.1:6379"])
def test_addresses(address: str) -> None:
    values = {"engine": "ray", "ray": {"address": address, "workers": 3}}
    sampling = load_config({"source": {"url": "a"}, "sampling": values}).sampling
    assert (sampling.workers, sampling.samplers) == (0, 3)


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "6379"])
def test_addresses_that_no_driver_can_have(address: str) -> None:
    with pytest.raises(ConfigError, match="expected auto, local or HOST:PORT"):
        load_config({"source": {"url": "a"}, "sampling": {"ray": {"address": address}}})
