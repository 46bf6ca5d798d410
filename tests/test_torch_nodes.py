"""Ranks agree by a gloo group of growcache's own: one all-reduce a pass, and signs of life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from growcache.errors import CacheError, ConfigError
from growcache.loading.agreement import Offer
from growcache.loading.options import LoaderOptions, Ranks
from growcache.loading.waiting import WaitControl

pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

from growcache.torch import node_group, stuck_loop  # noqa: E402
from growcache.torch.node_group import NodeGroup  # noqa: E402

pytestmark = pytest.mark.torch

Group = Callable[..., list[NodeGroup]]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Makes the ranks of one group, as threads of this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(node_group, "ROUND_SECONDS", 0.2)
    monkeypatch.setattr(node_group, "NAMING_SECONDS", 0.5)
    monkeypatch.setattr(node_group, "WARN_SECONDS", 0.0)
    monkeypatch.setattr(node_group, "LOOK_SECONDS", 0.02)
    made: list[NodeGroup] = []

    def make(
        count: int, only: Iterable[int] | None = None, store: Any = None, **unlike: Any
    ) -> list[NodeGroup]:
        store, first = store or dist.HashStore(), len(made)
        for rank in range(count) if only is None else only:
            options = LoaderOptions(
                "cache", batch_size=4, ranks=Ranks(rank, count, 0, 1, True, True)
            )
            if rank == count - 1:
                options = replace(options, **unlike)
            made.append(NodeGroup(options, store))
        return made[first:]

    yield make
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(NodeGroup.close, made))


def watch() -> WaitControl:
    return WaitControl(threading.Event(), lambda: False)


def agree(groups: list[NodeGroup], rows: list[int], pass_number: int = 0) -> list[int]:
    offers = [Offer(pass_number, rows=count) for count in rows]
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(NodeGroup.agree, groups, offers, [watch()] * len(groups)))


def test_all_take_the_smallest_offer_of_each_pass(group: Group) -> None:
    groups = group(3)
    for number, rows in enumerate(([5, 3, 8], [9, 2**40, 7], [0, 1, 1])):
        assert agree(groups, rows, number) == [min(rows)] * 3


def test_a_rank_that_waits_names_the_others_with_their_reasons(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    groups = group(2)
    groups[1].prepare(lambda: "waiting for 1000 samples in /cache, which has 12 so far")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(groups[0].agree, Offer(0, rows=3), watch())
        while not any("which has 12 so far" in text for text in caplog.messages):
            assert not first.done()
            time.sleep(0.02)
        assert groups[1].agree(Offer(0, rows=5), watch()) == first.result() == 3
    (said,) = [text for text in caplog.messages if "which has 12 so far" in text]
    assert said.startswith("rank 0 of job default waits for rank 1 (pid ")


@pytest.mark.parametrize(
    ("unlike", "offers"),
    [({"batch_size": 8}, [Offer(0), Offer(0)]), ({}, [Offer(1, step=4), Offer(1, step=5)])],
)
def test_ranks_that_differ_are_refused_with_both_sides(
    group: Group, unlike: dict[str, Any], offers: list[Offer]
) -> None:
    groups = group(2, **unlike)
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(one.agree, offer, watch())
            for one, offer in zip(groups, offers, strict=True)
        ]
        for one in found:
            with pytest.raises(
                ConfigError, match=r"in the same way: rank 0 is at pass .*, rank 1 \(pid"
            ):
                one.result()


def test_a_rank_that_leaves_ends_the_wait_of_the_others(group: Group) -> None:
    groups = group(3)
    assert agree(groups, [1, 1, 1]) == [1, 1, 1]
    groups[2].close()
    for one in groups[:2]:
        with pytest.raises(CacheError, match="rank 2 of job default ended, or closed"):
            one.agree(Offer(1), watch())


def test_a_rank_that_leaves_before_the_others_meet_is_named_at_once(group: Group) -> None:
    store = dist.HashStore()
    group(3, [2], store)[0].close()
    (waiting,) = group(3, [0], store)
    with pytest.raises(CacheError, match="rank 2 of job default ended, or closed"):
        waiting.agree(Offer(0), watch())
    (last,) = group(3, [1], store)
    with pytest.raises(CacheError, match=r"ranks? .*2 of job default ended, or closed"):
        last.agree(Offer(0), watch())


def test_no_thread_of_gloo_outlives_a_group_that_ended(group: Group) -> None:
    """Such a thread frees tensors, and aborts the process where the interpreter has ended by then."""
    before = native_threads("pt_gloo")
    groups = group(2)
    assert agree(groups, [1, 1]) == [1, 1]
    assert native_threads("pt_gloo") > before
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(NodeGroup.close, groups))
    assert native_threads("pt_gloo") <= before


def native_threads(name: str) -> int:
    comms = Path("/proc/self/task").glob("*/comm")
    return sum(comm.read_text().startswith(name) for comm in comms)


def test_a_rank_that_does_not_answer_is_named(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that was killed, or whose link is cut."""
    watched: list[int] = []
    monkeypatch.setattr(
        node_group, "end_stuck_loop", lambda thread, over: watched.append(thread)
    )
    monkeypatch.setattr(node_group, "ANSWER_SECONDS", 1.5)
    groups = group(3)
    assert agree(groups, [1, 1, 1]) == [1, 1, 1]
    dead = threading.Event()
    monkeypatch.setattr(groups[2], "_next_offer", lambda: (None, dead.wait(300)))
    for one in groups[:2]:
        with pytest.raises(
            CacheError, match=r"rank 2 \(pid .*\) of job default does not answer"
        ):
            one.agree(Offer(1), watch())
    assert watched == [threading.get_ident()] * 2
    assert sum("does not answer any more" in text for text in caplog.messages) == 2
    monkeypatch.undo()
    dead.set()


def test_a_defect_ends_the_wait_of_the_loop(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(group: NodeGroup) -> None:
        raise KeyError("defect")

    monkeypatch.setattr(NodeGroup, "_round", broken)
    monkeypatch.setattr(node_group, "end_stuck_loop", lambda thread, over: None)
    for one in group(2):
        with pytest.raises(CacheError, match="defect"):
            one.agree(Offer(0), watch())


@pytest.mark.parametrize("lacks", ["clone", "gloo"])
def test_an_older_torch_is_refused(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "gloo":
        monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    else:
        monkeypatch.setattr(node_group, "Store", object)
    with pytest.raises(ConfigError, match=r"torch 2\.8 or later, built with gloo; found torch"):
        node_group.node_group(LoaderOptions("cache", batch_size=4))


def test_a_loop_that_waits_in_torch_is_told_from_others() -> None:
    """And where its own code calls torch is named."""

    def frame(module: str, line: int, back: Any) -> Any:
        code = SimpleNamespace(co_filename=f"{module}.py")
        return SimpleNamespace(
            f_globals={"__name__": module}, f_back=back, f_lineno=line, f_code=code
        )

    mine = frame("train", 7, None)
    waits = frame("torch.distributed.distributed_c10d", 3252, frame("torch.x", 1, mine))
    assert stuck_loop.waits_in_torch(waits)
    assert stuck_loop.waits_in_torch(frame("torch.autograd.graph", 1, mine))
    assert not stuck_loop.waits_in_torch(mine)
    assert stuck_loop.caller(waits) == "train.py, line 7"
