"""Caches with samples that say who they are, written by the cache's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.cache.system import release_at_sigterm
from growcache.loading import blocks
from growcache.schema import Sample
from tests.filled import Filled


def full_of(shape: tuple[int, ...]) -> Callable[[int], Sample]:
    """Make samples whose ``x`` is full of their ``id``."""
    return lambda name: {"id": np.array(name, "<i8"), "x": np.full(shape, name, "<f4")}


@pytest.fixture(autouse=True, scope="session")
def watching_sigterm() -> None:
    """What is made once for a process is there, before tests count its descriptors."""
    release_at_sigterm()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a waiting consumer blocks of one batch, although these samples are small."""
    monkeypatch.setattr(blocks, "FIRST_BYTES", 0)


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., Filled]]:
    made: list[Filled] = []

    def make(name: str = "cache", shape: tuple[int, ...] = (4,), **config: Any) -> Filled:
        made.append(Filled(tmp_path / name, full_of(shape), **config))
        return made[-1]

    yield make
    for filled in made:
        filled.close()


@pytest.fixture
def cache(make_cache: Callable[..., Filled]) -> Filled:
    return make_cache()
