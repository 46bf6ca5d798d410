"""The bound is changed in the config file while the service runs, up and down."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import growcache
from growcache.cache.check import check
from growcache.cache.files import allocated_tree
from growcache.config import Config
from growcache.config_text import load_config
from growcache.errors import CacheFullError, ConfigError
from growcache.loading.snapshot import Snapshot
from growcache.sampling.config_reload import (
    LOOK_SECONDS,
    ConfigFile,
    ConfigReload,
    merged_config,
)
from tests.sampling.services import make_source, service, status, wait_until, write_config

MB = 1_000_000
BASE = {"source": {"url": "/nowhere/*.npy"}, "cache": {"max_bytes": "20MB"}}


def edit(path: Path, **changes: Any) -> None:
    """Change the file as editors do, by another in its place; None takes a key out."""
    values = yaml.safe_load(path.read_text())
    for dotted, value in changes.items():
        section, key = dotted.split("__")
        values.setdefault(section, {})[key] = value
        if value is None:
            del values[section][key]
    other = path.with_suffix(".new")
    other.write_text(yaml.safe_dump(values))
    other.rename(path)


class Followed:
    """A file that is followed, with what was adopted and said."""

    def __init__(self, path: Path, *overrides: str, **environment: str) -> None:
        path.write_text(yaml.safe_dump(BASE))
        file = ConfigFile(path, overrides, environment)
        self.config = file.load()
        self.following = ConfigReload(file, self.config, self.adopt, lambda: None)
        self.following.stop()  # so that nothing but the test's own clock decides
        self.clock = time.monotonic()
        self.disk_is_full = False

    def adopt(self, config: Config) -> None:
        if self.disk_is_full:
            raise CacheFullError("no room on the disk")
        if config.cache.max_bytes < MB:
            raise ConfigError("give at least 1 MB")
        self.config = config

    def look(self) -> list[str]:
        """What is said once the file was the same for long enough."""
        said = []
        for _ in range(2):
            self.clock += LOOK_SECONDS
            said += self.following.look(self.clock)
        return said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def test_what_may_change_is_taken_and_the_rest_is_named(path: Path) -> None:
    followed = Followed(path)
    assert followed.look() == []
    edit(path, cache__max_bytes="30MB", cache__min_uses=3, sampling__workers=4)
    (said,) = followed.look()
    assert said.endswith("restart the service for sampling.workers")
    assert (followed.config.cache.max_bytes, followed.config.cache.min_uses) == (30 * MB, 3)
    assert followed.config.sampling.workers == 2
    assert followed.look() == []


def test_overrides_and_the_environment_keep_winning(path: Path) -> None:
    by_hand = Followed(path, "cache.max_bytes=25MB")
    edit(path, cache__max_bytes="30MB")
    assert by_hand.look() == []
    assert by_hand.config.cache.max_bytes == 25 * MB
    surrounding = Followed(path, GROWCACHE_CACHE__MAX_BYTES="26MB")
    edit(path, cache__max_bytes="30MB")
    assert surrounding.look() == []
    assert surrounding.config.cache.max_bytes == 26 * MB


@pytest.mark.mutant(
    12,
    "growcache.sampling.config_reload:ConfigReload.look",
    "said = self._take()\nself._taken = signature",
    "self._taken = signature\nsaid = self._take()",
)
def test_what_a_full_disk_refuses_is_taken_later(path: Path) -> None:
    followed = Followed(path)
    assert followed.look() == []
    edit(path, cache__max_bytes="30MB")
    followed.disk_is_full = True
    with pytest.raises(CacheFullError):
        followed.look()
    followed.disk_is_full = False
    assert followed.look() == []
    assert followed.config.cache.max_bytes == 30 * MB


NONSENSE = [
    "",
    "- 1",
    "\x00",
    "{[]: 1}",
    "source: 2024-13-45",
    "source: {url: [",
    "source: {url: /nowhere/*.npy}\ncache: {max_bytes: some MB}",
    "cache: {max_bytes: 30MB}",
    "source: " + "[" * 5_000,
]


@pytest.mark.parametrize("text", NONSENSE, ids=lambda text: repr(text[:20]))
def test_a_file_that_makes_no_sense_changes_nothing(path: Path, text: str) -> None:
    followed = Followed(path)
    path.write_text(text)
    (said,) = followed.look()
    assert said.startswith("the change of the config is ignored: ")
    assert "\n" not in said
    assert followed.config.cache.max_bytes == 20 * MB
    path.unlink()
    assert "no config at" in followed.look()[0]
    path.write_text(yaml.safe_dump(BASE))
    edit(path, cache__max_bytes="30MB")
    assert followed.look() == []
    assert followed.config.cache.max_bytes == 30 * MB


def test_a_bound_that_is_not_there_any_more_is_not_the_default(path: Path) -> None:
    followed = Followed(path)
    edit(path, cache__max_bytes=None)
    (said,) = followed.look()
    assert said.endswith("restart the service for cache.max_bytes")
    assert followed.config.cache.max_bytes == 20 * MB


def test_what_is_refused_is_tried_again_with_the_next_file(path: Path) -> None:
    followed = Followed(path)
    edit(path, cache__max_bytes="1kB")
    assert followed.look() == ["the change of the config is ignored: give at least 1 MB"]
    edit(path, cache__max_bytes="2MB")
    assert followed.look() == []
    assert followed.config.cache.max_bytes == 2 * MB


def test_a_file_that_is_being_written_is_not_read(path: Path) -> None:
    followed = Followed(path)
    followed.look()
    for step in range(20):
        edit(path, cache__max_bytes=30 * MB + step)
        assert followed.following.look(followed.clock + LOOK_SECONDS * (step + 1)) == []
        assert followed.config.cache.max_bytes == 20 * MB
    followed.clock += 20 * LOOK_SECONDS
    assert followed.look() == []
    assert followed.config.cache.max_bytes == 30 * MB + 19


def test_only_live_keys_are_merged() -> None:
    running = load_config(BASE)
    others = {"source": {"url": "/else/*.npy"}, "cache": {"path": "else", "max_bytes": "30MB"}}
    config, keys = merged_config(running, load_config(others))
    assert keys == ["source.url", "cache.path"]
    assert config.cache.path == running.cache.path
    assert config.source == running.source
    assert config.cache.max_bytes == 30 * MB


def test_the_service_follows_its_file(tmp_path: Path) -> None:
    """Up and down, with a reader in the way, and through a file that makes no sense."""
    url = make_source(tmp_path / "in", count=500, shape=(16, 1024))
    config = write_config(tmp_path / "c.yaml", url, cache={"max_bytes": "8MB"})
    cache = tmp_path / "c"

    def now() -> Any:
        return status(cache)

    with service(config):
        wait_until(lambda: cache.exists() and (cache / "status.json").exists())
        wait_until(lambda: now().listing_complete)  # until then room is kept for it
        wait_until(lambda: now().state == "full")  # there is no reader, and min_uses is 1
        with Snapshot.take(cache) as snapshot:
            held = {row.number for row in snapshot.shards}
            edit(config, cache__max_bytes="4MB")
            wait_until(lambda: now().state == "shrinking" and now().retired_bytes)
            assert (now().max_bytes, now().target_bytes) == (8 * MB, 4 * MB)
            assert "readers to release shards" in now().waiting_for
            assert {int(p.name[:8]) for p in (cache / "shards").iterdir()} == held
            with Snapshot.take(cache) as smaller:
                assert len(smaller) < len(snapshot)
            config_text = config.read_text()
            config.write_text(config_text[: len(config_text) // 3] + "]")
            wait_until(lambda: any("is ignored: " in line for line in now().last_errors))
            config.write_text(config_text)
        wait_until(lambda: now().max_bytes == 4 * MB)
        assert allocated_tree(cache) <= 4 * MB
        assert now().state != "shrinking"
        edit(config, cache__max_bytes="1MB", sampling__workers=7)
        wait_until(lambda: any("give at least" in line for line in now().last_errors))
        assert any("restart the service for sampling.workers" in e for e in now().last_errors)
        assert now().target_bytes == 4 * MB
        edit(config, cache__max_bytes="12MB", sampling__workers=1)
        wait_until(lambda: now().bytes > 8 * MB)
        assert now().max_bytes == 12 * MB
    assert [f for f in check(cache) if f.severity == "error"] == []


@pytest.mark.slow
def test_a_cache_that_never_evicts_stays_and_says_so(tmp_path: Path) -> None:
    url = make_source(tmp_path / "in", count=200, shape=(16, 1024))
    bounds = {"max_bytes": "8MB", "eviction": "none"}
    config = write_config(tmp_path / "c.yaml", url, cache=bounds)
    cache = tmp_path / "c"
    with growcache.serve(config):
        wait_until(lambda: (cache / "status.json").exists() and status(cache).complete)
        before = status(cache).samples
        edit(config, cache__max_bytes="4MB")
        wait_until(lambda: status(cache).state == "shrinking")
        assert "a higher cache.max_bytes" in (status(cache).waiting_for or "")
        assert (status(cache).samples, status(cache).max_bytes) == (before, 8 * MB)
        edit(config, cache__max_bytes="16MB")
        wait_until(lambda: status(cache).samples == 200 and status(cache).complete)
