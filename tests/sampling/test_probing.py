"""What the first objects say about all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.remote.store import Entry
from growcache.sampling.probing import PROBE_BYTES, PROBE_OBJECTS, chunk, settle
from growcache.schema import Field, Schema


def _rows(n: int, dtype: str = "<f4") -> Schema:
    return Schema((Field("x", dtype, (n, 4)),))


RAGGED = Schema((Field("x", "<f4", (None, 4)),))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_a_schema_fits_most_samples(rows: list[int]) -> None:
    schemas = [_rows(n) for n in rows]
    settled = settle(schemas)
    fit = sum(settled.allows(schema) for schema in schemas)
    assert fit >= 0.75 * len(schemas)
    assert settled.is_ragged == (fit == len(schemas) and len(set(rows)) > 1)


def test_an_odd_one_makes_nothing_ragged() -> None:
    assert settle([_rows(5)] * 7 + [_rows(2)]) == _rows(5)
    assert settle([_rows(5)] * 7 + [_rows(5, "<i2")]) == _rows(5)


def test_an_odd_one_among_samples_of_many_sizes_is_left_out() -> None:
    assert settle([_rows(n) for n in range(1, 8)] + [_rows(1, "<i2")]) == RAGGED


def test_two_that_differ_in_size_are_ragged() -> None:
    assert settle([_rows(5), _rows(6)]) == RAGGED


def test_what_cannot_be_one_schema_says_what_to_do() -> None:
    with pytest.raises(FormatError, match=r"sampling\.transform.*sampling\.schema"):
        settle([_rows(5), _rows(5, "<i2")])


def test_large_objects_are_not_all_fetched_to_look_at_them() -> None:
    def entries(size: int) -> list[Entry]:
        return [Entry(str(i), size, None, None) for i in range(16)]

    assert len(chunk(entries(100), ranged=False)) == PROBE_OBJECTS
    assert len(chunk(entries(PROBE_BYTES // 2), ranged=False)) == 3
    assert len(chunk(entries(PROBE_BYTES + 1), ranged=False)) == 1
    assert len(chunk(entries(PROBE_BYTES + 1), ranged=True)) == PROBE_OBJECTS
