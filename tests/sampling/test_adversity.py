"""What goes wrong around the service ends in an answer, never in silence or a hang."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from growcache.cache.cache import Cache
from growcache.cache.files import allocated_tree
from growcache.cache.reader_lease import Lease
from growcache.config import CacheConfig
from growcache.config_text import load_config
from growcache.errors import ConfigError, SamplingError
from growcache.loading.waiting import wait_for_samples
from growcache.sampling.engines.child import EngineProcess
from growcache.sampling.messages import Message
from growcache.sampling.objects import Objects
from growcache.sampling.sampler_pool import (
    AssignedPermit,
    SamplerDeath,
    SamplerSlot,
)
from growcache.sampling.schema_search import MOST_FAILED, PROBED, SchemaSearch
from growcache.sampling.space_allocator import SpaceAllocator
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from tests.filled import Filled
from tests.sampling.services import (
    drawn,
    make_source,
    run,
    samplers_of,
    service,
    status,
    wait_until,
    write_config,
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("remote") / "objects", 60)


def one_clear_line(code: int, errors: str, expected: int) -> str:
    assert code == expected, errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 2, errors
    return errors


@pytest.fixture
def search(tmp_path: Path, url: str) -> SchemaSearch:
    config = load_config(write_config(tmp_path / "c.yaml", url))
    catalog = Catalog.open(tmp_path / "catalog.bin")
    catalog.append([Entry(f"k{i:03d}", 100, None, 0.0) for i in range(3 * PROBED)])
    with Cache.open(config.cache.path, config.cache) as cache:
        return SchemaSearch(config, cache, catalog, Objects(catalog))


READY = {"ranged": [False], "digests": {}, "text_digests": {}}
KILLED, CRASHED = SamplerDeath(-9), SamplerDeath(11)


def test_a_probe_that_dies_with_its_sampler_is_made_again(search: SchemaSearch) -> None:
    first, second = SamplerSlot(0), SamplerSlot(1)
    search.probe([first, second], listed=True)
    assert (first.probing, second.probing) == (True, False)
    search.probe([second], listed=True)  # one at a time
    assert not second.probing
    search.lost(second, KILLED)
    search.probe([second], listed=True)
    assert not second.probing
    search.lost(first, KILLED)
    search.probe([second], listed=True)
    assert second.probing


def test_an_object_whose_look_kills_is_named_in_the_end(search: SchemaSearch) -> None:
    asked = SamplerSlot(0)
    for _ in range(2):
        search.probe([asked], listed=True)
        search.lost(SamplerSlot(1), CRASHED)  # not the one who looked
        search.lost(asked, CRASHED)
    search.probe([asked], listed=True)
    with pytest.raises(SamplingError, match=r"looked at k000.*exit code 11"):
        search.lost(asked, CRASHED)


def test_a_crash_makes_the_first_object_decide_alone(search: SchemaSearch) -> None:
    looked = Looking()
    search.probe([looked], listed=True)
    search.lost(looked, KILLED)  # by an operator, or for lack of memory: not the work's fault
    search.probe([looked], listed=True)
    search.lost(looked, CRASHED)
    search.probe([looked], listed=True)
    assert looked.asked == [PROBED, PROBED, 1]


def test_what_is_looked_at_does_not_hang_on_how_far_the_listing_is(
    tmp_path: Path, url: str
) -> None:
    config = load_config(write_config(tmp_path / "c.yaml", url))
    looked = Looking()
    with (
        Catalog.open(tmp_path / "catalog.bin") as catalog,
        Cache.open(config.cache.path, config.cache) as cache,
    ):
        search = SchemaSearch(config, cache, catalog, Objects(catalog))
        for number in range(PROBED):
            search.probe([looked], listed=False)
            assert not looked.probing
            catalog.append([Entry(f"k{number}", 100, None, 0.0)])
        search.probe([looked], listed=False)
        assert looked.asked == [PROBED]


@pytest.mark.parametrize("passed_over", [0, 1])
def test_a_search_without_end_is_given_up(search: SchemaSearch, passed_over: int) -> None:
    slot = SamplerSlot(0)
    errors = ["k000: expected an .npy file"] * MOST_FAILED
    message = {"type": "probed", "errors": errors, "passed_over": passed_over, "set_aside": 0}
    search.probe([slot], listed=False)
    if passed_over:  # as the user may want
        assert search.answered(slot, message, READY, listed=False) is None
        return
    with pytest.raises(SamplingError, match=r"none of the first 1,000 .* first: k000: expec"):
        search.answered(slot, message, READY, listed=False)


def test_a_listing_that_ends_after_the_last_look_ends_the_search(
    search: SchemaSearch,
) -> None:
    slot = SamplerSlot(0)
    for _ in range(3):
        search.probe([slot], listed=False)
        message = {
            "type": "probed",
            "errors": ["k000: text"] * PROBED,
            "passed_over": 0,
            "set_aside": 0,
        }
        assert search.answered(slot, message, READY, listed=False) is None
    search.probe([slot], listed=False)
    assert not slot.probing  # for all that is listed so far was looked at
    with pytest.raises(SamplingError, match=r"no object .* the first: k000: text"):
        search.probe([slot], listed=True)


class Looking(SamplerSlot):
    """A sampler's place that notes how many objects it is asked to look at."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked: list[int] = []

    def send(self, message: Message) -> None:
        self.asked.append(len(message["visits"]))


class Unkilled(EngineProcess):
    """A process that only notes that it was killed."""

    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


def test_only_a_call_that_does_not_end_is_given_up() -> None:
    slot = SamplerSlot(
        0, process=(process := Unkilled()), ready=True, permits={"p": AssignedPermit(1)}
    )
    slot.progress_at = time.monotonic() - 20
    assert slot.is_stalled(time.monotonic(), 10)
    slot.note_user_call(5, "source.format my:read on k")
    assert not slot.is_stalled(time.monotonic(), 10)
    slot.progress_at -= 20
    slot.note_user_call(5, "source.format my:read on k")  # the same five have ended
    assert slot.is_stalled(time.monotonic(), 10)
    why = slot.kill_stalled(time.monotonic())
    assert process.killed
    assert why.startswith(
        "after 20 s in one call of source.format my:read on k; make it faster"
    )
    assert (
        SamplerDeath(-9, why).suspicion
        == SamplerDeath(11).suspicion
        > SamplerDeath(-9).suspicion
    )
    slot.call = (0.0, "long ago")
    assert slot.kill_stalled(slot.progress_at + 7) == "after 7 s without progress"


def test_only_the_one_who_was_asked_is_believed(search: SchemaSearch) -> None:
    first, second = SamplerSlot(0), SamplerSlot(1)
    search.probe([first], listed=True)
    nonsense = {"type": "probed", "schema": "not looked at"}
    assert search.answered(second, nonsense, READY, listed=True) is None
    assert first.probing


def test_a_store_that_does_not_answer_is_no_unreadable_object(search: SchemaSearch) -> None:
    slot = SamplerSlot(0)
    search.probe([slot], listed=True)
    found = search.answered(slot, {"transient": "503 SlowDown"}, READY, listed=True)
    assert found is None
    assert "503 SlowDown" in search.waiting_for
    search.probe([slot], listed=True)
    assert not slot.probing  # not at once


@pytest.mark.slow
def test_a_node_without_a_part_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    one = make_source(tmp_path / "one", 1)
    codes = []
    for node in (0, 1):
        config = write_config(
            tmp_path / f"node{node}.yaml", one, sampling={"node": node, "nodes": 2}
        )
        code, errors = run(config, "--until-full", seconds=20)
        codes.append(code)
        if code:
            assert "sampling.nodes" in one_clear_line(code, errors, 2)
    assert sorted(codes) == [0, 2]


def test_nodes_share_a_source_without_overlap(tmp_path: Path, url: str) -> None:
    total = 0
    for node in range(3):
        config = write_config(
            tmp_path / f"node{node}.yaml", url, sampling={"node": node, "nodes": 3}
        )
        assert run(config, "--until-full") == (0, "")
        total += status(tmp_path / f"node{node}").samples
    assert total == 60


def test_a_lowered_bound_is_reached_although_the_cache_is_complete(
    tmp_path: Path, url: str
) -> None:
    config = write_config(tmp_path / "cache.yaml", url)
    cache = tmp_path / "cache"
    assert run(config, "--until-full") == (0, "")
    bound = 800_000
    assert allocated_tree(cache) > bound
    lower = ["--set", f"cache.max_bytes={bound}", "--set", "cache.min_uses=0"]
    with service(config, *lower):
        wait_until(lambda: allocated_tree(cache) <= bound)
        wait_until(lambda: status(cache).max_bytes == bound)


def test_a_listing_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    for branch in range(2):
        (folder / f"{branch}-{'long-name-' * 20}").mkdir(parents=True)
    for number in range(8000):
        name = f"{number % 2}-{'long-name-' * 20}/{os.urandom(90).hex()}.npy"
        (folder / name).write_bytes(b"1")
    config = write_config(
        tmp_path / "cache.yaml", f"{folder}/**/*.npy", cache={"max_bytes": 1_200_000}
    )
    line = one_clear_line(*run(config, seconds=40), expected=2)
    assert "max_bytes" in line
    assert allocated_tree(tmp_path / "cache") <= 1_200_000


def test_until_full_ends_when_only_the_sidecars_are_large(tmp_path: Path) -> None:
    """Samples of a few bytes from keys of hundreds: estimates are off at first."""
    folder = tmp_path / ("deep-" * 40) / ("deeper-" * 30)
    folder.mkdir(parents=True)
    for number in range(3000):
        np.save(folder / f"{'n' * 20}{number:05d}.npy", np.float32(number))
    config = write_config(
        tmp_path / "cache.yaml",
        f"{folder}/*.npy",
        sampling={"workers": 2, "shard_samples": 256},
        cache={"max_bytes": 1_300_000},
    )
    assert run(config, "--until-full", seconds=40) == (0, "")
    assert 0 < drawn(tmp_path / "cache") < 3000


TRANSFORMS = """
import os
import numpy as np

def ragged_once(sample):
    if sample["x"].flat[0] == 7:
        return {"x": [[1, 2], [3]]}
    return sample

def crash(sample):
    if sample["x"].flat[0] == 7:
        os._exit(11)
    return sample
"""


def transform_config(tmp_path: Path, url: str, name: str) -> Path:
    (tmp_path / "wild_transforms.py").write_text(TRANSFORMS)
    (tmp_path / "broken_transforms.py").write_text("1 / 0\n")
    return write_config(
        tmp_path / "cache.yaml", url, sampling={"transform": name, "max_skipped": 0.1}
    )


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )


@pytest.mark.usefixtures("importable")
def test_a_transform_that_cannot_be_imported_is_a_bad_config(tmp_path: Path, url: str) -> None:
    config = transform_config(tmp_path, url, "broken_transforms:f")
    line = one_clear_line(*run(config, seconds=20), expected=2)
    assert "ZeroDivisionError" in line


@pytest.mark.usefixtures("importable")
def test_a_sample_that_is_no_array_is_one_hole(tmp_path: Path, url: str) -> None:
    config = transform_config(tmp_path, url, "wild_transforms:ragged_once")
    assert run(config, "--until-full", seconds=40) == (0, "")
    found = status(tmp_path / "cache")
    assert (found.samples, found.holes, found.restarts) == (59, 1, 0)


@pytest.mark.usefixtures("importable")
def test_a_transform_that_kills_its_process_ends_the_service(tmp_path: Path, url: str) -> None:
    config = transform_config(tmp_path, url, "wild_transforms:crash")
    line = one_clear_line(*run(config, seconds=60), expected=1)
    assert "exit code 11" in line


def test_a_cache_that_is_deleted_under_the_service_ends_it(tmp_path: Path, url: str) -> None:
    config = write_config(
        tmp_path / "cache.yaml", url, sampling={"max_bytes_per_second": 100_000}
    )
    cache = tmp_path / "cache"
    with service(config) as process:
        wait_until(lambda: drawn(cache) > 8)
        (cache / "shards").rename(tmp_path / "gone")  # at once, unlike a deletion
        _, errors = process.communicate(timeout=300)
        one_clear_line(process.returncode, errors, expected=1)


def test_samplers_killed_at_their_start_are_replaced(tmp_path: Path, url: str) -> None:
    """Also in the middle of the first probe, which only one of them makes."""
    config = write_config(tmp_path / "cache.yaml", url, sampling={"workers": 2})
    cache = tmp_path / "cache"
    with service(config, "--until-full") as process:
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:
            for victim in samplers_of(process.pid):
                os.kill(victim, 9)
            time.sleep(0.4)
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert status(cache).samples == 60


@pytest.mark.slow
def test_a_reader_that_waits_for_more_than_fits_is_told(tmp_path: Path, url: str) -> None:
    """Protocol 23: the bound leaves room for fewer samples than the loader asks for."""
    config = write_config(tmp_path / "cache.yaml", url, cache={"max_bytes": 800_000})
    with service(config), pytest.raises(ConfigError, match="min_samples"):
        wait_for_samples(tmp_path / "cache", 60)


def test_whoever_holds_shards_is_named(tmp_path: Path) -> None:
    with Filled(tmp_path / "cache") as filled:
        filled.add(0, 1)
        bounds = CacheConfig.model_validate({"path": filled.root, "max_bytes": "1GB"})
        allocator = SpaceAllocator(bounds, filled.cache, evicts=True)
        first = Lease.create(filled.root, "train", [0])
        filled.retire(0)
        filled.poll()
        assert re.search(
            r"shards: a snapshot is held for \d+ s by job train ", allocator.awaited()
        )
        second = Lease.create(filled.root, "eval", [1])
        filled.poll()
        assert "2 snapshots are held, the oldest for " in allocator.awaited()
        first.close()
        second.close()


def test_advice_about_a_source_is_given_once(
    search: SchemaSearch, caplog: pytest.LogCaptureFixture
) -> None:
    slot = SamplerSlot(0)
    search.probe([slot], listed=True)
    message = {
        "type": "probed",
        "measure": {"stride_bytes": 8.0, "overhead_bytes": 0, "samples": 1},
        "samples_per_object": 1.0,
        "schema": [["x", "<f4", [2]]],
        "sample_bytes": 8.0,
        "advice": "x has scale_factor 2: set scale: cf in source.options",
    }
    found = search.answered(slot, message, READY, listed=True)
    assert found is not None
    assert [record.message for record in caplog.records] == [message["advice"]]
