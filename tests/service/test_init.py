"""The commented config: complete, true to the model, and safe to write."""

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from growcache.config import CacheConfig, Config, SamplingConfig, SourceConfig, load_config
from growcache.errors import ConfigError
from growcache.service.init import EXAMPLE_URL, config_text, write_config

SECTIONS: dict[str, type[BaseModel]] = {
    "source": SourceConfig,
    "sampling": SamplingConfig,
    "cache": CacheConfig,
}


def test_every_value_in_it_is_the_default() -> None:
    assert load_config(yaml.safe_load(config_text())) == load_config(
        {"source": {"url": EXAMPLE_URL}}
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_the_model_is_in_it(section: str) -> None:
    assert set(yaml.safe_load(config_text())[section]) == set(SECTIONS[section].model_fields)
    assert set(yaml.safe_load(config_text())) == set(Config.model_fields)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_choice_is_named_and_every_key_has_a_comment(section: str) -> None:
    text = config_text()
    for name, field in SECTIONS[section].model_fields.items():
        above = text[: text.index(f"\n  {name}:")]
        block = re.split(r"\n(?!  #|  \w+:)", above)[-1]
        assert "#" in block, f"{section}.{name} has no comment"
        if get_origin(field.annotation) is Literal:
            for choice in get_args(field.annotation):
                assert choice in text, f"{section}.{name}: {choice} is not mentioned"


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_url_survives(url: str) -> None:
    assert load_config(yaml.safe_load(config_text(url=url))).source.url == (url,)


def test_it_does_not_overwrite_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "growcache.yaml"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        write_config(file, EXAMPLE_URL)
    assert file.read_text() == "mine"
    write_config(file, EXAMPLE_URL, force=True)
    assert load_config(file).source.url == (EXAMPLE_URL,)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        write_config(tmp_path / "no" / "growcache.yaml", EXAMPLE_URL)
