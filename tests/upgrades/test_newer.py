"""A cache that a newer growcache wrote is refused in one line: never damaged, never repaired."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from growcache.cache.check import check, repair
from growcache.cache.files import CacheLayout, checksummed_json
from growcache.cache.index.reader import read_index
from growcache.cache.sidecar import Sidecar
from growcache.cache.status import read_status
from growcache.cli.clear import empty_cache
from growcache.errors import CachePathError
from tests.cache.making import add, opened
from tests.cache.test_structure import read_bytes


@pytest.mark.mutant(8, "growcache.cache.recovery:_refuse_newer_shards", "rows[-1:]", "()")
def test_a_cache_of_a_newer_version_is_refused_wherever_its_shards_show_it(
    tmp_path: Path,
) -> None:
    """A newer sidecar is no damage, so no repair takes its shard away."""
    root = tmp_path / "cache"
    with opened(root) as cache:
        add(cache, 0)
        add(cache, 1)
    path = CacheLayout(root).sidecar(1)
    sidecar = dataclasses.replace(Sidecar.from_bytes(path.read_bytes()), format_version=2)
    path.write_bytes(sidecar.to_bytes())
    before = read_bytes(root)
    message = r"00000001\.json was written by a newer growcache .*upgrade growcache"
    for use in (lambda: opened(root).__enter__(), lambda: check(root), lambda: repair(root)):
        with pytest.raises(CachePathError, match=message):
            use()
    (root / "index.sqlite").unlink()  # and none is made again without its shards
    with pytest.raises(CachePathError, match=message):
        opened(root).__enter__()
    shards = [path.name for path in CacheLayout(root).shards.iterdir()]
    assert {name: before[name] for name in shards} == read_bytes(CacheLayout(root).shards)
    assert len(shards) == 4


def test_a_marker_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    with opened(root) as cache:
        add(cache, 0)
    layout = CacheLayout(root)
    layout.marker.write_bytes(checksummed_json({"about": "later", "layout": 3}))
    before = read_bytes(root)
    for use in (
        lambda: opened(root).__enter__(),
        lambda: check(root),
        lambda: repair(root),
        lambda: read_index(root),
        lambda: read_status(root),
        lambda: empty_cache(root),
    ):
        with pytest.raises(CachePathError, match="made by a newer growcache"):
            use()
    assert read_bytes(root) == before
