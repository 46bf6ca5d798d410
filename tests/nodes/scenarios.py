"""What may happen to a job over several nodes. Each scenario checks itself, and returns its figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from growcache.loading.saved_pass import unpack_numbers
from tests.nodes.cluster import Cluster, Job, Node, cluster, wait_until

LINKS = (1.6e6, 0.8e6, 0.4e6, 0.4e6)  # bytes a second
MOST_SECONDS = 60  # in which the others end
JOB_SECONDS = 240
ONE_PASS: dict[str, Any] = {"batch_size": 4, "min_samples": 60, "seed": 1, "drop_last": False}

Figures = dict[str, Any]


def growing(folder: Path, nodes: int, per_node: int = 1) -> Figures:
    """Epochs grow; all ranks make equal numbers of steps; no two nodes draw the same sample."""
    with cluster(folder, LINKS[:nodes]) as it:
        for node in it.nodes:
            node.serve(nodes)
        job = it.launch(
            it.nodes, per_node, batch_size=8, min_samples=60, epochs=4, seconds=0.1, seed=1
        )
        _finish(job)
        steps = _equal_steps(job)
        assert len(steps) == 4
        assert max(steps) > steps[0], steps
        drawn = [_all_samples(job, number) for number in range(nodes)]
        for first, second in combinations(drawn, 2):
            assert not first & second
        for number in range(nodes):
            for epoch in range(4):
                found = job.samples(number, epoch)
                assert len(set(found)) == len(found)
        return {"steps": steps, "cached": [node.samples for node in it.nodes]} | _agreed(job)


def empty_node(folder: Path, killed: bool = False) -> Figures:
    """A node whose cache is empty makes all wait, and each rank names it; then they train, or end where it dies."""
    with cluster(folder, LINKS[:2]) as it:
        it.nodes[0].serve(2)
        job = it.launch(it.nodes, batch_size=4, min_samples=60, epochs=2, seed=1)
        named = "rank 0 of job default waits for rank 1 (pid "
        wait_until(lambda: named in job.log(0), JOB_SECONDS, named)
        said = next(line for line in job.log(0).splitlines() if named in line)
        assert str(it.nodes[1].cache) in said
        figures: Figures = {"said": said.split("WARNING ")[1]}
        if not killed:
            it.nodes[1].serve(2)
            _finish(job)
            return figures | {"steps": _equal_steps(job)}
        began = time.monotonic()
        it.nodes[1].place.kill()
        assert all(job.wait(MOST_SECONDS, [0]))
        figures["seconds until the other ends"] = round(time.monotonic() - began, 1)
        assert "CacheError: rank 1 (pid" in job.output(0), job.output(0)[-3000:]
        return figures


def resize(folder: Path) -> Figures:
    """Two nodes, then three, then two go on in the same pass: equal steps, no sample twice."""
    with cluster(folder, LINKS[:3]) as it:
        jobs: list[Job] = []
        for count, steps, epochs in ((2, 10, 1), (3, 8, 1), (2, None, 2)):
            for node in it.nodes[:count]:
                node.serve(count)
            for node in it.nodes[count:]:
                node.stop_service()
            _wait_for_samples(it.nodes[:count], 150)
            states = str(jobs[-1].common_state()[1]) if jobs else None
            more: Figures = {"epochs": epochs, "steps": steps, "states": states}
            job = it.launch(it.nodes[:count], **ONE_PASS, **more)
            _finish(job)
            jobs.append(job)
        _check_pass(
            [[x for job in jobs for x in job.samples(number, 0)] for number in range(2)],
            _pass_lengths(jobs[0], 2),
        )
        return {"steps": [_equal_steps(job) for job in jobs]}


def dead_node(folder: Path, how: str, dead: int = 2) -> Figures:
    """The others end within a minute and say which; the job goes on in the pass with a node fewer."""
    left = [number for number in range(3) if number != dead]
    with cluster(folder, LINKS[:3]) as it:
        for node in it.nodes:
            node.serve(3)
        _wait_for_samples(it.nodes, 150)
        first = it.launch(it.nodes, seconds=0.4, **ONE_PASS)
        wait_until(lambda: first.steps() >= 10, JOB_SECONDS, "ten steps")
        place, began = it.nodes[dead].place, time.monotonic()
        (place.cut if how == "cut" else place.kill)()
        assert all(first.wait(MOST_SECONDS, left)), [first.output(n) for n in left]
        seconds = time.monotonic() - began
        steps = _go_on(it, first, left)
        said = [line for n in left for line in first.log(n).splitlines() if " ERROR " in line]
        assert said
        return {
            "seconds until the others end": round(seconds, 1),
            "steps": steps,
            "said": [line.split("ERROR ")[1] for line in said],
        }


def _go_on(it: Cluster, first: Job, left: Sequence[int]) -> list[int]:
    """Go on with the nodes that are left, and return the steps; no sample of the pass comes twice."""
    step, states = first.common_state()
    lengths = _pass_lengths(first, 3)
    for new, old in enumerate(left):
        (states / f"{old}.json").rename(states / f"{new}.json")
        it.nodes[old].serve(3)
    second = it.launch(
        [it.nodes[old] for old in left], epochs=2, states=str(states), **ONE_PASS
    )
    _finish(second)
    delivered = [
        first.samples(old, 0, until=step) + second.samples(new, 0)
        for new, old in enumerate(left)
    ]
    _check_pass(delivered, [lengths[old] for old in left])
    return _equal_steps(second)


SCENARIOS: dict[str, Callable[[Path], Figures]] = {
    "2 nodes": lambda folder: growing(folder, 2),
    "3 nodes": lambda folder: growing(folder, 3),
    "4 nodes": lambda folder: growing(folder, 4),
    "3 nodes of 2 ranks": lambda folder: growing(folder, 3, per_node=2),
    "an empty cache": empty_node,
    "an empty cache whose node is killed": lambda folder: empty_node(folder, killed=True),
    "2, 3, 2 nodes": resize,
    "a node is killed": lambda folder: dead_node(folder, "killed"),
    "the first node is killed": lambda folder: dead_node(folder, "killed", dead=0),
    "a link is cut": lambda folder: dead_node(folder, "cut"),
}


def _finish(job: Job) -> None:
    codes = job.wait(JOB_SECONDS)
    assert not any(codes), [job.output(number)[-3000:] for number in range(len(job.nodes))]


def _wait_for_samples(nodes: Sequence[Node], least: int) -> None:
    wait_until(
        lambda: all(node.samples >= least for node in nodes), JOB_SECONDS, f"{least} samples"
    )


def _equal_steps(job: Job) -> list[int]:
    """Return the steps of each epoch, which all ranks made alike."""
    found = job.steps_of_epochs()
    assert all(one == found[0] for one in found), found
    return list(found[0].values())


def _all_samples(job: Job, node: int) -> set[int]:
    return {x for epoch in job.steps_of_epochs()[0] for x in job.samples(node, epoch)}


def _agreed(job: Job) -> Figures:
    found = job.agreements()
    return {
        "all-reduce ms": {"median": median(found), "most": max(found), "passes": len(found)}
    }


def _pass_lengths(job: Job, nodes: int) -> list[int]:
    """Return how many samples the pass of each node has, by the states saved last."""
    states = job.common_state()[1]
    passes = [json.loads((states / f"{n}.json").read_text())["pass"] for n in range(nodes)]
    return [int(unpack_numbers(one["samples"]).sum()) for one in passes]


def _check_pass(delivered: Sequence[list[int]], lengths: Sequence[int]) -> None:
    """No node delivers a sample of the pass twice, and the smallest delivers all of it."""
    for found in delivered:
        assert len(set(found)) == len(found)
        assert len(found) == min(lengths), lengths
