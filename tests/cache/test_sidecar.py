from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.sidecar import Hole, Origins, SampleOrigin, Sidecar
from growcache.errors import CachePathError, CorruptShardError
from growcache.schema import Origin
from tests.cache.making import make

rows = st.builds(
    SampleOrigin,
    key=st.text(max_size=20),
    etag=st.none() | st.text(max_size=8),
    size=st.integers(0, 2**50),
    mtime=st.none() | st.floats(0, 2e9),
    part=st.integers(0, 99),
    parts=st.integers(1, 100),
    start=st.integers(0, 2**40),
    stop=st.integers(0, 2**40),
    store=st.integers(0, 2),
)


@given(st.lists(rows, max_size=20), st.lists(st.text(max_size=10), max_size=3))
def test_what_was_written_is_read_again(drawn: list[SampleOrigin], reasons: list[str]) -> None:
    sidecar, _ = make(5, 0)
    sidecar = dataclasses.replace(
        sidecar,
        samples=len(drawn),
        origins=Origins.pack(drawn),
        holes=tuple(Hole("k", i, reason) for i, reason in enumerate(reasons)),
        counts={"b": 2, "a": 1},
    )
    again = Sidecar.from_bytes(sidecar.to_bytes())
    assert again == sidecar
    assert again.to_bytes() == sidecar.to_bytes()
    for i, row in enumerate(drawn):
        assert again.origin(i) == Origin(row.key, row.etag, row.start, row.stop)
        identities = list(again.origins.identities)
        assert identities[again.origins.object[i]] == (row.store, row.key)


def test_every_damaged_byte_is_found() -> None:
    data = make(3, 2)[0].to_bytes()
    for place in range(len(data) - 1):
        with pytest.raises(CorruptShardError):
            Sidecar.from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    for length in range(len(data)):
        with pytest.raises(CorruptShardError):
            Sidecar.from_bytes(data[:length])


@pytest.mark.mutant(
    8, "growcache.cache.sidecar:_refuse_newer", "version > FORMAT_VERSION", "False"
)
def test_a_later_version_is_refused_by_name() -> None:
    sidecar = dataclasses.replace(make(3, 0)[0], format_version=2)
    with pytest.raises(CachePathError, match="written by a newer growcache") as caught:
        Sidecar.from_bytes(sidecar.to_bytes())
    assert not isinstance(caught.value, CorruptShardError)


def test_no_version_is_damage() -> None:
    sidecar = dataclasses.replace(make(3, 0)[0], format_version=0)
    with pytest.raises(CorruptShardError, match="expected version 1, found 0"):
        Sidecar.from_bytes(sidecar.to_bytes())


@pytest.mark.parametrize("stores", [(0,), (0, 1, 2, -1), (0, 1, 2, "a"), (0,) * 9])
def test_stores_are_numbers_one_for_each_object(stores: tuple[Any, ...]) -> None:
    sidecar, _ = make(3, 4)
    origins = dataclasses.replace(sidecar.origins, stores=(0, 1, 0, 2))
    good = dataclasses.replace(sidecar, origins=origins)
    assert Sidecar.from_bytes(good.to_bytes()) == good
    bad = dataclasses.replace(sidecar, origins=dataclasses.replace(origins, stores=stores))
    with pytest.raises(CorruptShardError):
        Sidecar.from_bytes(bad.to_bytes())
