"""A service after damage: what is lost is drawn again, the same, and nothing else is."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from growcache.cache.check import check
from growcache.cache.files import CacheLayout, shard_number
from growcache.cache.index.reader import read_index
from growcache.cache.sidecar import Sidecar
from growcache.cli.cli import main
from tests.sampling.services import (
    digests,
    make_source,
    run,
    write_config,
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    url = make_source(tmp_path / "data")
    return write_config(tmp_path / "cache.yaml", url, sampling={"shard_samples": 16})


def root_of(config: Path) -> Path:
    return config.with_suffix("")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def keep_only_shards(layout: CacheLayout) -> None:
    for path in layout.root.iterdir():
        if path.is_dir() and path != layout.shards:
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()


def times_drawn(layout: CacheLayout) -> Counter[str]:
    """How often each object was drawn into the shards on disk."""
    found: Counter[str] = Counter()
    for path in layout.shards.glob("*.json"):
        sidecar = Sidecar.from_bytes(path.read_bytes())
        found.update(sidecar.origins[i].key for i in range(sidecar.samples))
    return found


def test_damaged_shards_and_index_are_mended_and_drawn_again(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = CacheLayout(root_of(config))
    assert run(config, "--until-full") == (0, "")
    before = digests(layout.root)
    flip(layout.shard(2), 3000)
    layout.sidecar(4).unlink()
    shutil.rmtree(layout.leases)
    flip(layout.index, 0)
    code, said = run(config, "--until-full")
    assert code == 1
    assert f"growcache check {layout.root} --repair" in said.replace("\n", " ")
    assert main(["check", str(layout.root)]) == 1
    assert main(["check", str(layout.root), "--repair"]) == 0
    assert "the next growcache run draws them again" in capsys.readouterr().out
    assert main(["check", str(layout.root)]) == 0
    left = digests(layout.root)
    assert len(left) < len(before)
    assert left.items() <= before.items()
    assert run(config, "--until-full") == (0, "")
    assert digests(layout.root) == before
    assert check(layout.root) == []
    assert read_index(layout.root).complete


@pytest.mark.slow
def test_shards_alone_are_taken_over_and_nothing_is_drawn_twice(config: Path) -> None:
    layout = CacheLayout(root_of(config))
    assert run(config, "--samples", "60") == (0, "")
    before = digests(layout.root)
    keep_only_shards(layout)
    assert run(config, "--until-full") == (0, "")
    after = digests(layout.root)
    assert before.items() <= after.items()
    assert set(times_drawn(layout).values()) == {1}
    assert check(layout.root) == []
    highest = max(n for name in before if (n := shard_number(Path(name))) is not None)
    missing = set(range(highest)) - {row.number for row in read_index(layout.root).shards}
    assert not missing, "all of them lay there"
    assert len(times_drawn(layout)) == 120


@pytest.mark.slow
def test_shards_alone_of_another_configuration_are_refused(config: Path) -> None:
    layout = CacheLayout(root_of(config))
    assert run(config, "--samples", "20") == (0, "")
    before = digests(layout.root)
    keep_only_shards(layout)
    for _ in range(2):  # the first refusal must not be the end of them
        code, said = run(config, "--set", "sampling.seed=1", "--samples", "40")
        assert code == 2
        assert "holds samples of another configuration" in said
        assert digests(layout.root) == before
    assert run(config, "--samples", "1") == (0, "")
    assert before.items() <= digests(layout.root).items()
