"""Every client, behind a proxy that tampers with answers: right bytes in the end, or an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from growcache.errors import ObjectChangedError, TransientStoreError
from tests.servers.tampering import BODIES, KINDS, RANGES, Answer, Tampering, Wanted, tampering
from tests.store.places import MARKED, Place, only, opened, read_once

DATA = b"".join(b"%07d " % number for number in range(2000))
NAME = "a/x.npy"
HTTP = ("moto", "ceph", "gcs", "azure", "web")
# The proxy tampers with every server's answers alike, so `make test` runs each client once.
AGAIN = ("ceph+obstore",)  # the client of moto+auto
BEHIND = [
    pytest.param(*marked.values, marks=[*marked.marks, *[pytest.mark.slow] * (name in AGAIN)])
    for marked in MARKED
    if (name := str(marked.values[0])).partition("+")[0] in HTTP
]


@pytest.fixture(params=BEHIND)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with opened(request, request.param, tmp_path) as found:
        found.put(NAME, DATA)
        yield found


@pytest.fixture
def proxy(place: Place) -> Iterator[Tampering]:
    with tampering(endpoint_of(place), {"x.npy": DATA}) as found:
        yield found


def endpoint_of(place: Place) -> str:
    if place.base.startswith("http"):
        return place.base.rstrip("/")
    if "connection_string" in place.options:
        fields = dict(
            part.split("=", 1) for part in place.options["connection_string"].split(";") if part
        )
        return str(fields["BlobEndpoint"])
    return str(place.options["endpoint_url"])


def behind(place: Place, proxy: Tampering) -> Place:
    if place.base.startswith("http"):
        return replace(place, base=proxy.endpoint + "/")
    text = json.dumps(place.options).replace(endpoint_of(place), proxy.endpoint)
    return replace(place, options=json.loads(text))


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        *((tamper.__name__, (6400, 9600)) for tamper in (*RANGES, *BODIES)),
        *((tamper.__name__, ()) for tamper in BODIES),
    ],
)
def test_a_wrong_answer_is_tried_again(
    place: Place, proxy: Tampering, kind: str, limits: tuple[int, ...]
) -> None:
    retried: list[BaseException] = []
    store = behind(place, proxy).open(NAME, on_retry=retried.append)
    entry = only(store)
    expected = DATA[slice(*limits)] if limits else DATA
    done: list[Wanted] = []

    def once(wanted: Wanted, answer: Answer) -> Answer:
        if done:
            return answer
        done.append(wanted)
        return KINDS[kind](wanted, answer)

    proxy.tamper = once
    assert read_once(store, entry, *limits) == expected
    assert done
    assert all(isinstance(error, TransientStoreError) for error in retried)


@pytest.mark.parametrize(
    "kind",
    [
        "other_bytes",
        "short",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("short_range", "too_long")),
    ],
)
def test_wrong_answers_for_ever_are_a_transient_failure(
    place: Place, proxy: Tampering, kind: str
) -> None:
    store = behind(place, proxy).open(NAME, timeout_seconds=0.5)
    entry = only(store)
    proxy.tamper = KINDS[kind]
    with pytest.raises(TransientStoreError, match=r"a/x\.npy.*given up after"):
        read_once(store, entry, 6400, 9600)


@pytest.mark.parametrize("kind", ["short_range", "other_total"])
def test_behind_a_wrong_answer_an_object_that_was_rewritten_is_changed(
    place: Place, proxy: Tampering, kind: str
) -> None:
    if "gs://" in place.base and place.client == "auto":
        pytest.skip("this emulator ignores If-Match; see test_clouds")
    store = behind(place, proxy).open(NAME)
    entry = only(store)
    proxy.tamper = KINDS[kind]
    place.put(NAME, DATA[::-1] + b"longer")
    with pytest.raises(ObjectChangedError, match="rewritten"):
        read_once(store, entry, 6400, 9600)
