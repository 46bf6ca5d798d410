"""The power fails after every system call of a writer; the next start finds a valid cache."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.cache.making import KINDS
from tests.crash import power, tracing, work
from tests.crash.tracing import need_strace
from tests.crash.verify import told, verify

SOME = 3  # calls of a record after which the everyday suite cuts the power
SLICES = 2
SECONDS = 1200


@pytest.mark.parametrize(("life", "part"), [*work.parts_of_lives(SLICES, SECONDS)])
def test_the_power_goes_after_a_call(life: str, part: int | None, tmp_path: Path) -> None:
    need_strace()
    lives, kind, max_bytes = work.LIVES[life]
    base = tmp_path / "disk"
    base.mkdir()
    root, log = base / "cache", tmp_path / "log"
    calls = tracing.record(lives, root, kind, log=log, below=base, data=True)
    places = range(len(calls))
    chosen = random.sample(places, SOME) if part is None else places[part::SLICES]
    disk, rng, seen = power.Disk(base), random.Random(random.random()), set()
    for place, call in enumerate(calls):
        disk.apply(call)
        if place not in chosen:
            continue
        said = told(before.mark for before in calls[: place + 1] if before.mark)
        for arrived, names, data in power.kinds_of_cut(rng):
            tree = disk.cut(names, data)
            if (state := hash((said, *sorted(tree.items(), key=lambda item: item[0])))) in seen:
                continue
            seen.add(state)
            shutil.rmtree(base)
            base.mkdir()
            power.lay_out(tree, base)
            where = f"{life}, power cut after {call}, {arrived} arrived"
            verify(root, KINDS[kind], said, where, max_bytes)
    assert seen


def test_a_new_cache_is_there_after_a_power_cut(tmp_path: Path) -> None:
    """The cache's directories survive, or all of it is lost with the issued groups."""
    need_strace()
    base, kind = tmp_path / "disk", "tfrecord-fixed"
    base.mkdir()
    root = base / "deep" / "cache"
    calls = tracing.record(work.direct, root, kind, log=tmp_path / "l", below=base, data=True)
    issued = next(place for place, call in enumerate(calls) if call.mark == "issued 0")
    disk = power.Disk(base)
    for call in calls[:issued]:
        disk.apply(call)
    shutil.rmtree(base)
    base.mkdir()
    power.lay_out(disk.cut(lambda: False, lambda: False), base)
    said = told(["issued 0"])
    verify(root, KINDS[kind], said, "power cut", work.DIRECT_MAX_BYTES)
