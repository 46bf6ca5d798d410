"""Caches whose samples say who they are, and who came in batches of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.filled import Filled


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., Filled]]:
    made: list[Filled] = []

    def make(*arguments: Any, name: str = "cache", **config: Any) -> Filled:
        made.append(Filled(tmp_path / name, *arguments, **config))
        return made[-1]

    yield make
    for filled in made:
        filled.close()


@pytest.fixture
def cache(make_cache: Callable[..., Filled]) -> Filled:
    return make_cache()


def ids(batches: Iterable[Any]) -> list[int]:
    return [int(i) for batch in batches for i in batch["id"].numpy()]


def written(*numbers: int, samples: int = 10) -> list[int]:
    return [1000 * number + row for number in numbers for row in range(samples)]
