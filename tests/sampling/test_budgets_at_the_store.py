"""Budgets as the store sees them: the bytes that it is asked for, refusals apart."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.sampling.services import run, service, status, wait_until, write_config
from tests.servers.web import web

OBJECTS, OBJECT_BYTES = 160, 100_000


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    folder = tmp_path / "objects"
    folder.mkdir()
    for number in range(OBJECTS):
        np.save(folder / f"{number:05d}.npy", np.full(OBJECT_BYTES // 8 - 16, number, "<i8"))
    return tmp_path


def payload_bytes(requests: Sequence[str]) -> int:
    """Return the bytes that were asked for: of a range, or of a whole object."""
    asked = (re.match(r"GET /objects/\d+\.npy ?(bytes=(\d+)-(\d+))?$", one) for one in requests)
    return sum(
        int(found[3]) + 1 - int(found[2]) if found[1] else OBJECT_BYTES
        for found in asked
        if found
    )


@pytest.fixture
def refusing(objects: Path) -> Iterator[tuple[str, list[str], dict[str, list[int]]]]:
    asked: list[str] = []
    refuses: dict[str, list[int]] = {"no/such.npy": [404]}
    with web(objects, asked=asked, refuses=refuses) as address:
        yield f"{address}/objects/*.npy", asked, refuses


def test_a_run_reads_what_max_egress_says(
    tmp_path: Path, refusing: tuple[str, list[str], dict[str, list[int]]]
) -> None:
    """Of 160 objects 16 are refused once, which costs nothing; all that is allowed is read."""
    url, asked, refuses = refusing
    refuses.update({f"objects/{n:05d}.npy": [200, 503, 200] for n in range(0, OBJECTS, 10)})
    most = 10_000_000
    config = write_config(
        tmp_path / "cache.yaml",
        url,
        sampling={"workers": 2, "max_egress": most, "shard_samples": 8},
    )
    assert run(config, "--until-full") == (0, "")
    found = status(tmp_path / "cache")
    refused = sum(1 for left in refuses.values() if left == [200]) * OBJECT_BYTES
    assert most - OBJECT_BYTES <= found.egress_bytes <= most
    assert payload_bytes(asked) - refused == pytest.approx(most, abs=2 * OBJECT_BYTES)
    # The search for a schema reads about 8 objects; of the others one group at most is lost.
    assert found.drawn >= most // OBJECT_BYTES - 8 - 2 * 8


@pytest.mark.slow
def test_a_run_reads_as_fast_as_max_bytes_per_second_says(
    tmp_path: Path, refusing: tuple[str, list[str], dict[str, list[int]]]
) -> None:
    url, asked, _ = refusing
    rate, seconds = 1_500_000, 30.0
    config = write_config(
        tmp_path / "cache.yaml",
        url,
        sampling={"workers": 2, "max_bytes_per_second": rate, "order": "replacement"},
        cache={"max_bytes": "60MB", "min_uses": 0},
    )
    with service(config):
        wait_until(lambda: payload_bytes(asked) > 2 * rate)
        before, began = payload_bytes(asked), time.monotonic()
        time.sleep(seconds)
        read, took = payload_bytes(asked) - before, time.monotonic() - began
    assert read / took == pytest.approx(rate, rel=0.02)
