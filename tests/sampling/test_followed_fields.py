"""Which fields formats keep to in a cache that exists."""

from __future__ import annotations

from typing import Any

import pytest

from growcache.config import Config
from growcache.sampling.fingerprint import identify
from growcache.sampling.messages import AS_FOUND, fields_to_follow
from growcache.sampling.sizing import Sizing
from growcache.schema import Schema


@pytest.mark.parametrize(
    ("transform", "sizes", "expected"),
    [
        (None, {}, ["x", "y"]),
        ("code:f", {AS_FOUND: True}, None),
        (
            "code:f",
            {},
            [],
        ),  # it was given what earlier versions found, and may pass all of it on
    ],
)
def test_caches_go_on_with_the_fields_that_they_have(
    transform: str | None, sizes: dict[str, Any], expected: list[str] | None
) -> None:
    values = {
        "source": {"url": "s3://b/*.npy"},
        "sampling": {"transform": transform},
        "cache": {"path": "c"},
    }
    schema = Schema.declared({"x": "int64", "y": "int64"})
    config = Config.model_validate(values)
    identity = identify(config, schema, Sizing(1, 1.0, 0, True, 8), {}, sizes)
    assert fields_to_follow(identity) == expected
