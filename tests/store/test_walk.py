"""Listings by fsspec: in order, complete, and never silently short of a folder."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.config_source import SourceConfig
from growcache.errors import StoreError, TransientStoreError
from growcache.store.listing import walk_folders
from growcache.store.opening import open_store
from tests.servers.web import web

NAMES = ["a/1", "a/2", "b/4", "b/c/3", "z"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def keys(
    address: str, failures: list[BaseException] | None = None, timeout_seconds: float = 1
) -> list[str]:
    store = open_store(
        SourceConfig(url=(f"{address}/",), client="fsspec"),
        timeout_seconds=timeout_seconds,
        on_retry=(failures if failures is not None else []).append,
    )
    return [entry.key for page in store.pages() for entry in page]


def test_a_folder_that_fails_for_a_while_is_listed_in_the_end(tree: Path) -> None:
    failures: list[BaseException] = []
    with web(tree, refuses={"b": [503, 503, 200], "b/c": [503, 200]}) as address:
        assert keys(address, failures, timeout_seconds=20) == NAMES
    assert len(failures) == 3


def test_a_folder_that_fails_for_good_fails_the_listing(tree: Path) -> None:
    with web(tree, refuses={"b": [503]}) as address, pytest.raises(TransientStoreError):
        keys(address)


def test_another_refusal_fails_the_listing_at_once(tree: Path) -> None:
    with web(tree, refuses={"b/c": [400]}) as address, pytest.raises(StoreError, match="400"):
        keys(address)


def test_a_folder_that_may_not_be_read_is_left_out_with_a_warning(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with web(tree, refuses={"b/c": [403]}) as address, caplog.at_level(logging.WARNING):
        assert keys(address) == ["a/1", "a/2", "b/4", "z"]
    assert "/b/c: no permission to read it" in caplog.text


def test_a_folder_that_has_gone_is_empty(tree: Path) -> None:
    with web(tree, refuses={"b": [404]}) as address:
        assert keys(address) == ["a/1", "a/2", "z"]


PATHS = st.lists(
    st.lists(st.sampled_from(["a", "b", "a-", "a.", "é", "c d", "0"]), min_size=1, max_size=4),
    max_size=12,
)
NUMBERS = itertools.count()


def memory_tree(paths: list[list[str]]) -> tuple[Any, str, set[str]]:
    fs, root = fsspec.filesystem("memory"), f"/walk{next(NUMBERS)}"
    files: set[str] = set()
    for parts in paths:
        name = f"{root}/" + "/".join(parts)
        above = {name.rsplit("/", n)[0] for n in range(1, len(parts))}
        if not above & files and not any(f.startswith(name + "/") for f in files):
            files.add(name)
            fs.pipe_file(name, b"")
    if not files:
        fs.makedirs(root)
    return fs, root, files


@given(PATHS, st.integers(1, 5))
def test_names_come_in_order_and_go_on_anywhere(paths: list[list[str]], depth: int) -> None:
    fs, root, files = memory_tree(paths)
    names = [info["name"] for info in walk_folders(fs, root, None)]
    assert names == sorted(files)
    for at, name in enumerate(names):
        assert [info["name"] for info in walk_folders(fs, root, None, name)] == names[at + 1 :]
    near = {name for name in files if name.removeprefix(root).count("/") <= depth}
    assert {info["name"] for info in walk_folders(fs, root, depth)} == near
    fs.rm(root, recursive=True)
