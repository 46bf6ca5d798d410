"""The JSON Schema of a configuration takes what the service takes, and explains every key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from growcache.cli.cli import app
from growcache.cli.init_text import config_text
from growcache.config import Config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
FIELDS = {"x": "s3://b/x_{k}.npy", "y": {"url": "s3://b/y_{k}.npy", "options": {"axis": 0}}}


@pytest.fixture(scope="module")
def schema() -> Any:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    return json.loads(printed.stdout)


def errors(schema: Any, values: Any) -> list[str]:
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return [error.message for error in validator(schema).iter_errors(values)]


@pytest.mark.parametrize(
    "values",
    [
        *(yaml.safe_load(path.read_text(encoding="utf-8")) for path in CONFIGS),
        yaml.safe_load(config_text()),
        {"source": {"fields": FIELDS}},
        {"source": {"dataset": "package.module:make"}},
        {"source": {"url": "s3://b/**", "manifest": "keys.parquet"}},
        {"source": [{"url": "a/*", "weight": 2}, {"url": ["b/*", "c/*"]}]},
        {"source": {"url": "a"}, "cache": {"min_free": "1%", "max_bytes": "2TB"}},
        {"source": {"url": "a"}, "sampling": {"schema": {"x": ["float32", None, 64], "note": "str"}}},
        {"source": {"url": "a", "labels": {"url": "l.csv", "key": "k", "columns": "a", "classes": [0, 1]}}},
    ],
)  # fmt: skip
def test_what_the_service_takes_is_valid(schema: Any, values: Any) -> None:
    Config.model_validate(values)
    assert errors(schema, values) == []


@pytest.mark.parametrize(
    "values",
    [
        {"sampling": {}},
        {"source": {"format": "npy"}},
        {"source": {"url": "a", "formt": "npy"}},
        {"source": {"url": "a"}, "cache": {"eviction": "lru"}},
        {"source": {"url": "a"}, "sampling": {"workers": -1}},
        {"source": {"url": "a"}, "chache": {}},
    ],
)
def test_what_the_service_refuses_is_not(schema: Any, values: Any) -> None:
    assert errors(schema, values)


def test_every_key_of_a_section_has_its_comment(schema: Any) -> None:
    sections = ("SourceConfig", "SamplingConfig", "CacheConfig")
    keys = {
        (section, key): value.get("description", "")
        for section in sections
        for key, value in schema["$defs"][section]["properties"].items()
    }
    assert [key for key, description in keys.items() if not description] == []
