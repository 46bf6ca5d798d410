"""The commented config: complete, true to the model, and safe to write."""

import re
import socket
import time
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from growcache.cli.cli import main
from growcache.cli.init_choices import EXAMPLE_URL, ConfigChoices, InitOptions, propose_choices
from growcache.cli.init_questions import apply_answer, ask_for_choices
from growcache.cli.init_text import config_text, write_config
from growcache.cli.prove_candidate import ProbedSource
from growcache.cli.source_probe import probe_source
from growcache.config import CacheConfig, Config, SamplingConfig
from growcache.config_source import SourceConfig
from growcache.config_text import load_config
from growcache.errors import ConfigError, ObjectMissingError, StoreError
from tests.cli.terminals import terminal
from tests.servers import Bucket

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


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@example("a", "\xa0", "b", {"\u3000": "\u2003"})
@given(TEXTS, TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS | st.integers() | st.booleans()))
def test_any_choice_survives(url: str, path: str, seen: str, options: dict[str, Any]) -> None:
    chosen = ConfigChoices(url, "raw", options, options, path, "3GB", [seen, "b"], seen)
    config = load_config(yaml.safe_load(config_text(choices=chosen)))
    assert config.sources[0].url == (url,)
    assert config.sources[0].options == config.sources[0].storage_options == options
    assert config.cache.path == Path(path)
    assert config.cache.max_bytes == 3_000_000_000


@given(st.text())
def test_no_key_of_an_object_breaks_out_of_its_comment(key: str) -> None:
    text = config_text(choices=ConfigChoices(findings=[f"Looked at {key}."], bound_reason=key))
    assert load_config(yaml.safe_load(text)) == load_config({"source": {"url": EXAMPLE_URL}})


def test_it_does_not_overwrite_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "growcache.yaml"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        write_config(file, ConfigChoices())
    assert file.read_text() == "mine"
    write_config(file, ConfigChoices(), force=True)
    assert load_config(file).sources[0].url == (EXAMPLE_URL,)
    assert [path.name for path in tmp_path.iterdir()] == ["growcache.yaml"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        write_config(tmp_path / "no" / "growcache.yaml", ConfigChoices())
    with pytest.raises(ConfigError, match="is a folder"):
        write_config(tmp_path, ConfigChoices(), force=True)


def test_what_does_not_load_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        write_config(tmp_path / "c.yaml", ConfigChoices(max_bytes="plenty"))
    with pytest.raises(ConfigError, match="did you mean npy"):
        write_config(tmp_path / "c.yaml", ConfigChoices(format="npyy"))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ looking and asking


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """40 recordings, an empty one before them."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "00.npy").touch()
    for i in range(1, 41):
        np.save(folder / f"{i:02d}.npy", np.zeros((64, 32, 32), "<f4"))
    return folder


def test_a_look_lists_and_reads_one_object(data: Path) -> None:
    found = probe_source(SourceConfig(url=(f"{data}/*.npy",)))
    assert (found.objects, found.is_whole_listing) == (41, True)
    assert found.nbytes == sum(path.stat().st_size for path in data.iterdir())
    assert found.options == {"axis": 0}


def test_a_look_at_a_bucket(bucket: Bucket) -> None:
    for name in ("dog/1.png", "cat/1.png"):
        bucket.put(f"pets/{name}", b"\x89PNG\r\n\x1a\n" + bytes(64))
    found = probe_source(
        SourceConfig(url=(bucket.url("pets/**"),), storage_options=bucket.storage_options)
    )
    assert found.format == "image"
    assert found.options == {"classes": ["cat", "dog"]}


def test_a_look_gives_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        source = SourceConfig(
            url=("s3://bucket/*.npy",), storage_options={"endpoint_url": address, "anon": True}
        )
        began = time.monotonic()
        with pytest.raises(StoreError):
            probe_source(source, seconds=1.5)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("url", "said"),
    [("{data}/*.txt", "found no object at"), ("{data}/00.npy", "found only empty objects at")],
)
def test_a_look_that_finds_nothing_says_so(url: str, said: str, data: Path) -> None:
    with pytest.raises(ObjectMissingError, match=said):
        probe_source(SourceConfig(url=(url.format(data=data),)))


def test_options_win_over_the_look() -> None:
    look = ProbedSource(3, 300, True, "npy", {"axis": 0}, ("seen",), 5, 20)
    found = propose_choices(
        InitOptions("u", format="npy", max_bytes="3GB", cache_path="c", anon=True), look
    )
    assert (found.options, found.max_bytes, found.cache_path) == ({"axis": 0}, "3GB", "c")
    assert found.storage_options == {"anon": True}
    other = propose_choices(InitOptions("u", format="bytes"), look)
    assert (other.format, other.options, list(other.findings)) == ("bytes", {}, [])


def test_init_proposes_and_the_service_takes_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "growcache.yaml"
    url, cache = f"{data}/*.npy", str(tmp_path / "cache")
    assert main(["init", str(file), "--yes", "--url", url, "--cache", cache]) == 0
    text = file.read_text()
    assert "# > Each of its 64 rows [32, 32] is a sample, read by range" in text
    assert load_config(file).sources[0].options == {"axis": 0}
    assert main(["run", str(file), "--samples", "10"]) == 0


def test_init_without_an_answer_writes_nothing_but_a_guess_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "growcache.yaml"
    command = ["init", str(file), "--url", f"{tmp_path}/none/*.npy"]
    assert main(command) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert not file.exists()
    assert main([*command, "--force"]) == 0
    assert "could not look at" in capsys.readouterr().err
    assert load_config(file).sources[0].format == "npy"


def test_answers_are_asked_for_where_options_say_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "URL": f"{data}/nothing/*.npy",
        "Try": f"{data}/*.npy",
        "Format": "npy",
        "Options of the format": ["{axes: 0}", "{window: 8}"],
        "Folder of the cache": "here",
        "Bound of the cache": "2GB",
    }

    def answer(question: str, **_: Any) -> Any:
        found = answers[question]
        return found.pop(0) if isinstance(found, list) else found

    found = ask_for_choices(InitOptions(), answer)
    said = capsys.readouterr().err
    assert (found.url, found.options) == (f"{data}/*.npy", {"window": 8})
    assert (found.cache_path, found.max_bytes, found.bound_reason) == ("here", "2GB", "")
    assert "Could not look there" in said
    assert "Found 41 objects" in said
    assert "did you mean axis?" in said


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("anon", InitOptions("s3://b/*", anon=True)),
        ("http://minio:9000", InitOptions("s3://b/*", endpoint_url="http://minio:9000")),
        ("gs://b/*", InitOptions("gs://b/*")),
    ],
)
def test_an_answer_may_be_another_url_an_endpoint_or_anon(
    answer: str, expected: InitOptions
) -> None:
    assert apply_answer(InitOptions("s3://b/*"), answer) == expected


def test_init_asks_at_a_terminal(data: Path, tmp_path: Path) -> None:
    with terminal("init", cwd=tmp_path, columns=120) as seen:
        seen.wait_for("URL [")
        seen.type(f"{data}/*.npy")
        for question in (
            "Format [npy]",
            "Options of the format [{axis: 0}]",
            "Folder",
            "Bound",
        ):
            seen.wait_for(question)
            seen.type("")
        assert seen.end() == 0
    assert "Wrote growcache.yaml; start the service" in seen.text
    assert load_config(tmp_path / "growcache.yaml").sources[0].options == {"axis": 0}


def test_ctrl_c_at_a_question_writes_nothing(tmp_path: Path) -> None:
    with terminal("init", cwd=tmp_path) as seen:
        seen.wait_for("URL [")
        seen.type("\x03")
        assert seen.end() in (1, 130)
    assert "Traceback" not in seen.text
    assert list(tmp_path.iterdir()) == []
