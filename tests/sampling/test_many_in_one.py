"""Objects that hold many samples of different lengths, through the service."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from growcache.loading.snapshot import Snapshot
from tests.formats.test_tar import archive
from tests.formats.test_tfrecord import example, file
from tests.sampling.services import digests, run, status, write_config

OBJECTS, EACH = 2, 1000


class Case(NamedTuple):
    """A format, how its objects are made, and how its samples tell which they are."""

    suffix: str
    encode: Callable[[list[int]], bytes]
    source: dict[str, Any]


def text(number: int) -> str:
    return "é" * (number % 90)


def json_lines(numbers: list[int]) -> bytes:
    lines = (json.dumps({"id": n, "text": text(n)}, ensure_ascii=False) for n in numbers)
    return "\n".join(lines).encode()


def records(numbers: list[int]) -> bytes:
    return file([example({"id": n, "text": text(n).encode()}) for n in numbers])


def tarred(numbers: list[int]) -> bytes:
    files = ((f"{n}.id", b"%d" % n, f"{n}.text", text(n).encode()) for n in numbers)
    return archive([pair for file in files for pair in (file[:2], file[2:])])


WISHES = {"id": "int64", "text": "str"}
CASES = {
    "jsonl": Case(".jsonl", json_lines, {"format": "jsonl"}),
    "tfrecord": Case(
        ".tfrecord", records, {"format": "tfrecord", "options": {"features": WISHES}}
    ),
    "tar": Case(".tar", tarred, {"format": "tar", "options": {"fields": ["id", "text"]}}),
    "jsonl.gz": Case(
        ".jsonl.gz", lambda ns: gzip.compress(json_lines(ns)), {"format": "jsonl"}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("tar", "tfrecord") else ())
        for name in CASES
    ],
)
def test_every_sample_is_cached_once(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    (tmp_path / "objects").mkdir()
    for i in range(OBJECTS):
        numbers = list(range(i * EACH, (i + 1) * EACH))
        (tmp_path / "objects" / f"{i}{case.suffix}").write_bytes(case.encode(numbers))
    url = f"{tmp_path}/objects/*{case.suffix}"
    found = []
    twice = (2,) if name.endswith("gz") else (2, 7)
    for concurrency in twice:
        sampling = {"concurrency": concurrency, "shard_samples": 500}
        config = write_config(
            tmp_path / f"{concurrency}.yaml",
            url,
            source=case.source,
            sampling=sampling,
            cache={"max_bytes": "60MB"},
        )
        assert run(config, "--until-full") == (0, "")
        found.append(digests(tmp_path / f"{concurrency}"))
    assert found[0] == found[-1]
    shown = status(tmp_path / "2")
    assert (shown.complete, shown.holes, shown.samples) == (True, 0, OBJECTS * EACH)
    with Snapshot.take(tmp_path / "2") as snapshot:
        samples = [snapshot[i] for i in range(len(snapshot))]
    assert sorted(int(sample["id"]) for sample in samples) == list(range(OBJECTS * EACH))
    assert all(sample["text"] == text(int(sample["id"])) for sample in samples)
    assert samples[0]["id"].dtype == np.int64
