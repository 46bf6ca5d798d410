"""What the configuration says about what a user typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from growcache.cache.formats import CACHE_FORMATS
from growcache.config import Config
from growcache.config_text import load_config
from growcache.errors import ConfigError
from growcache.formats import open_format
from growcache.sampling.fingerprint import configured_values

SOURCE: dict[str, Any] = {"source": {"url": "s3://bucket/*.npy"}}


def config(**sections: Any) -> Config:
    return load_config({**SOURCE, **sections})


def test_a_schema_is_dtypes_and_dimensions() -> None:
    wish = {
        "x": ["float32", None, 64],
        "big": [">i2", 3],
        "note": "str",
        "data": ["bytes"],
        "n": "int64",
    }
    made = config(sampling={"schema": wish})
    assert made.sampling.schema == {
        "x": ("<f4", None, 64),
        "big": ("<i2", 3),
        "note": ("str",),
        "data": ("bytes",),
        "n": ("<i8",),
    }
    assert Config.model_validate(made.model_dump(mode="json")) == made
    lists = {name: list(wish) for name, wish in made.sampling.schema.items()}
    assert configured_values(made)["sampling.schema"] == lists
    assert config().sampling.schema == "auto"


def test_a_section_of_comments_is_none(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("source: {url: a}\nsampling:\n  # seed: 3\ncache:\n")
    assert load_config(path) == load_config({"source": {"url": "a"}})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sampling": {"schema": {"x": ["flot32", 3]}}}, "schema: x: .* did you mean float32?"),
        ({"sampling": {"schema": {"x": ["float32", -1]}}}, "schema: x: dimensions are integers"),
        ({"sampling": {"schema": {"x": ["float32", True]}}}, "dimensions are integers"),
        ({"sampling": {"schema": {"x": "O"}}}, "schema: x: expected bytes, str or a dtype"),
        ({"sampling": {"schema": {"x": "datetime64[s]"}}}, "expected bytes, str or a dtype"),
        ({"sampling": {"schema": {"x": ["str", 1]}}}, "schema: x: str has no dimensions"),
        ({"sampling": {"schema": "autp"}}, "schema: expected auto, or names"),
        ({"sampling": {"schema": {}}}, "schema: expected auto, or names"),
        ({"sampling": {"samples_per_object": "x"}}, "expected 'auto' or a valid integer.*found 'x'"),
        ({"sampling": {"transfrom_options": {}}}, "unknown key .* did you mean transform_options?"),
        ({"sampling": {"max_byts": 1}}, "unknown key .* did you mean cache.max_bytes?"),
        ({"max_bytes": 1}, "unknown key max_bytes; did you mean cache.max_bytes?"),
        ({"smapling": {}}, "unknown key smapling; did you mean sampling?"),
        ({"sampling": {"zzz": 1}}, "unknown key sampling.zzz; known are seed, order"),
        (
            {"sampling": {"strata": {"by": "x", "wieghts": 1}}},
            "unknown key sampling.strata.wieghts; did you mean weights?",
        ),
        ({"sampling": {"strata": {"weights": "sqrt"}}}, "sampling.strata.by is missing"),
        (
            {"sampling": {"strata": {"by": "x", "weights": {"cat": -1}}}},
            "sampling.strata.weights: expected greater than or equal to 0, found -1",
        ),
        ({"split": {"fractions": {"a": 1}, "use": "a", "gruop": "x"}}, "split.gruop; did you mean group?"),
        ({"cache": {"eviction": "fifoo"}}, "found 'fifoo'; did you mean fifo?"),
        ({"cache": {"format": "npz"}}, "expected 'tfrecord' or 'npy', found 'npz'; did you mean npy?"),
        ({"cache": {"max_bytes": "10XB"}}, "cache.max_bytes: .*XB"),
        ({"cache": []}, "cache: expected a mapping"),
        ({"source": {"url": [1]}}, "source.url.0: expected a valid string, found 1"),
        ({"source": {"url": []}}, "source.url: name at least one URL"),
        ({"source": "s3://b"}, "source: expected a mapping, found 's3://b'"),
        ({"source": {}}, "source.url is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_line_with_the_nearest_key(
    sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^config: .*{words}") as caught:
        config(**sections)
    assert "\n" not in str(caught.value)


def test_two_mistakes_are_two_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        config(sampling={"sed": 1, "workers": 0}, cache={"evict": 1})
    assert len(str(caught.value).splitlines()) == 2


def test_overrides_and_variables_are_hinted_at_too() -> None:
    with pytest.raises(ConfigError, match=r"cache\.evction; did you mean eviction\?"):
        load_config(SOURCE, ["cache.evction=fifo"])
    with pytest.raises(ConfigError, match=r"unknown key seed; did you mean sampling\.seed\?"):
        load_config(SOURCE, ["seed=1"])
    with pytest.raises(ConfigError, match=r"did you mean workers\?"):
        load_config(SOURCE, environment={"GROWCACHE_SAMPLING__WORKER": "1"})


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"endpoint_url": "http://user:secret@minio:9000/?sig=secret"}, "http://minio:9000"),
        ({"client_kwargs": {"endpoint_url": "http://minio:9000", "region_name": "x"}}, "http://minio:9000"),
        ({"endpoint_url": "user:secret@minio"}, "minio"),
    ],
)  # fmt: skip
def test_the_server_is_part_of_the_source_and_secrets_are_not(
    options: dict[str, Any], kept: str
) -> None:
    secrets = {"key": "secret", "secret": "secret", "token": "secret", "anon": False}
    source = {"url": "s3://b/*", "storage_options": {**options, **secrets}}
    found = configured_values(config(source=source))
    assert found["source.storage_options"] == {"endpoint_url": kept}
    assert "secret" not in str(found)


def test_shards_laid_out_otherwise_are_another_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [config(cache={"format": name}) for name in CACHE_FORMATS]
    before = [configured_values(one) for one in made]
    monkeypatch.setattr(CACHE_FORMATS["tfrecord"], "LAYOUT_VERSION", 10**6)
    after = dict(zip(CACHE_FORMATS, map(configured_values, made), strict=True))
    assert after["npy"] in before
    assert after["tfrecord"] not in before


def test_another_server_is_another_source() -> None:
    def on(**options: Any) -> dict[str, Any]:
        return configured_values(config(source={"url": "s3://b/*", "storage_options": options}))

    assert on(endpoint_url="http://a") != on(endpoint_url="http://b")
    assert on(endpoint_url="http://a") == on(endpoint_url="http://a/", key="k", secret="s")
    assert on(host="h", port=1) != on(host="h", port=2)
    assert on() == on(anon=True)


def test_a_format_named_by_mistake() -> None:
    with pytest.raises(ConfigError, match="did you mean image"):
        open_format("images", {})


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (
            {"fractions": {"a": 0.5, "b": 0.6}, "use": "a"},
            "shares that add up to at most 1, found 1.1",
        ),
        ({"fractions": {"a": 0.5}, "use": "b"}, r"use: expected one of the fractions \(a\)"),
        ({"fractions": {}, "use": "b"}, "name a subset"),
        ({"fractions": {"a": 1}, "use": "a", "group": "sub-[0-9]+"}, r"expected \(\?P<group>"),
        (
            {"fractions": {"a": 1}, "use": "a", "group": "(?P<group>"},
            "not a regular expression",
        ),
        ({"fractions": {"a": 1}}, "split.use is missing"),
    ],
)
def test_a_split_that_cannot_be_meant(split: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({"source": {"url": "x"}, "split": split})
