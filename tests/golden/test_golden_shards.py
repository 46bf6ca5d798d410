"""Shards of known configurations are, byte for byte, what they always were.

A user's cache is continued, resumed from a checkpoint and repaired by filling its shards again:
so the content of shard n of a configuration is a promise. ``digests.json`` has, per case of
`tests.golden.cases`, a digest of all files of its shards except the sidecars, and one of each
sample's origin. Neither depends on machine, port, number of samplers or time.

To capture the digests again: ``python -m tests.golden [CASE ...]``. That is right only for a change
that is meant to change what is drawn or written; it raises the version of the draws or of the
format for those caches that it concerns, and says so in its commit and in the change log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.golden.capture import KNOWN, Facts, captured
from tests.golden.cases import CASES
from tests.golden.making import make
from tests.servers.web import web

SIDE_BY_SIDE = 2
Found = dict[str, "Future[Facts]"]


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Found]:
    """What the chosen cases hold, some side by side: each is a process that mostly starts."""
    objects = tmp_path_factory.mktemp("objects")
    make(objects)
    items = request.session.items
    wanted = [name for name in CASES if any(i.name.endswith(f"[{name}]") for i in items)]
    with web(objects) as address, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            yield {
                name: pool.submit(
                    captured, name, objects, address, tmp_path_factory.mktemp("case")
                )
                for name in wanted
            }
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if case.slow else [])
        for n, case in CASES.items()
    ],
)
def test_shards_are_what_they_always_were(name: str, found: Found) -> None:
    assert found[name].result() == json.loads(KNOWN.read_text())[name]


def test_digests_are_of_known_cases() -> None:
    assert json.loads(KNOWN.read_text()).keys() == CASES.keys()
