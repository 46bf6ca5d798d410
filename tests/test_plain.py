"""Values of a configuration as JSON has them, and back."""

from __future__ import annotations

from datetime import timedelta, timezone
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from growcache.config_text import from_json_value, to_json_value
from growcache.errors import ConfigError

keys = st.none() | st.booleans() | st.integers() | st.text("ab!", max_size=5) | st.dates()
leaves = st.one_of(
    keys,
    st.floats(),
    st.datetimes(timezones=st.none() | st.just(timezone(timedelta(hours=5)))),
    st.binary(max_size=8),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.sampled_from(["!map", "!float", "nan"]),
    st.sets(st.integers() | st.dates(), max_size=3),
)
tags = st.sampled_from(["!map", "!float", "!int", "!set", "!bytes", "!date", "!time"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | tags, inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_a_value_comes_back_from_json(value: Any) -> None:
    plain = to_json_value(value)
    kept = orjson.loads(orjson.dumps(plain, option=orjson.OPT_SORT_KEYS))
    assert kept == plain
    assert to_json_value(from_json_value(kept)) == plain


@given(values)
def test_what_yaml_wrote_and_read_is_the_same(value: Any) -> None:
    read = yaml.safe_load(yaml.safe_dump(value))
    assert to_json_value(read) == to_json_value(yaml.safe_load(yaml.safe_dump(read)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (float("nan"), None),
        ({1: 2}, {"1": 2}),
        ({True: 2}, {1.5: 2}),
        (b"a", "a"),
        ({"!float": "nan"}, float("nan")),
        ({1, 2}, [1, 2]),
    ],
)
def test_different_values_have_different_json(one: Any, other: Any) -> None:
    assert to_json_value(one) != to_json_value(other)


def test_what_yaml_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="found complex"):
        to_json_value({"a": [1j]})
