"""A clearing that is cut short: the next service finds the whole cache, or none of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from growcache.cache.files import CacheLayout, allocated_tree
from growcache.cache.generations import begin_generation
from growcache.cache.index.reader import read_index
from growcache.cli import clear
from growcache.errors import CacheMissingError
from growcache.humanize import in_bytes
from tests.cache.making import add, opened
from tests.forked import fork

SHARDS = list(range(4))


def fill(root: Path) -> CacheLayout:
    with opened(root) as cache:
        for number in SHARDS:
            add(cache, number)
        cache.layout.catalog.write_bytes(b"the listing")
        return cache.layout


def killed_before(step: int, root: Path) -> bool:
    """Clear in a process that dies before its n-th unlink; False when it got to its end."""
    child = fork()
    if not child:
        unlink, left = os.unlink, step

        def fused(path: str | Path, *, dir_fd: int | None = None) -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            unlink(path, dir_fd=dir_fd)

        os.unlink = fused  # type: ignore[assignment]
        try:
            clear.empty_cache(root)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return status != 0


def test_killed_at_every_step(tmp_path: Path) -> None:
    wholes, step = [], 1
    while True:
        root = tmp_path / f"{step}"
        layout = fill(root)
        if not killed_before(step, root):
            break
        with opened(root) as cache:
            found = [row.number for row in read_index(root).shards]
            assert found in (SHARDS, []), f"half a cache, killed at step {step}"
            wholes.append(bool(found))
            if not found:
                assert cache.meta.issued == -1, "groups of what is no more would be drawn first"
                assert not layout.catalog.exists(), "it may be of another source"
                assert not list(layout.shards.iterdir())
            assert cache.totals().lost_shards == 0
            add(cache, 10)
        step += 1
    assert not any(wholes), "a clearing that started is finished"
    assert len(wholes) > len(SHARDS)


def test_no_file_goes_before_the_note_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, unlink, fsync = fill(tmp_path / "cache"), os.unlink, os.fsync
    events: list[Path] = []

    def noted(path: str | Path, *, dir_fd: int | None = None) -> None:
        assert layout.clearing.exists()
        unlink(path, dir_fd=dir_fd)
        events.append(Path(path))

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "unlink", noted)
    monkeypatch.setattr(os, "fsync", synced)
    clear.empty_cache(layout.root)
    first = next(place for place, path in enumerate(events) if path.name == "index.sqlite")
    assert events[first - 1] == layout.root
    note = events.index(layout.clearing)
    assert {layout.root, layout.shards} <= set(events[first:note]), "the rest is synced first"
    assert events[note + 1 :] == [layout.root]


def test_what_was_cut_short_can_be_cleared_again(tmp_path: Path) -> None:
    layout = fill(tmp_path / "cache")
    assert killed_before(6, layout.root)
    clear.empty_cache(layout.root)
    assert not list(layout.shards.iterdir())
    with pytest.raises(CacheMissingError):
        read_index(layout.root)


def test_the_question_and_the_answer_are_about_all_generations(tmp_path: Path) -> None:
    fill(tmp_path)
    begin_generation(tmp_path, any_owner=False)
    opened(tmp_path / "generation-1").close()
    whole = allocated_tree(tmp_path)
    assert f"Delete {in_bytes(whole)} of" in clear.clear_question(tmp_path)
    said = clear.empty_cache(tmp_path)
    assert f"; freed {in_bytes(whole - allocated_tree(tmp_path))}" in said
    assert not any(CacheLayout(tmp_path / f"generation-{n}").index.exists() for n in (0, 1))
    with pytest.raises(CacheMissingError, match=f"no cache at {tmp_path};"):
        read_index(tmp_path)
