"""Where S3 settings come from, and that obstore understands them as boto3 does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.errors import AccessError, ConfigError
from growcache.store.credentials import S3Settings, s3_settings
from growcache.store.opening import open_store
from tests.servers import Bucket

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "env-key", "AWS_SECRET_ACCESS_KEY": "env-secret"}


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, without this machine's credentials."""
    import os

    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    folder = tmp_path / ".aws"
    folder.mkdir()
    return folder


def settings(options: Mapping[str, Any]) -> S3Settings:
    found = s3_settings("bucket", options)
    assert found is not None
    return found


def keys(found: S3Settings) -> tuple[str, str, str | None]:
    assert found.provider is not None
    answer = found.provider()
    return answer["access_key_id"], answer["secret_access_key"], answer["token"]


def test_options_win_and_take_no_token_from_the_environment(
    aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**ENVIRONMENT, "AWS_SESSION_TOKEN": "env-token"}.items():
        monkeypatch.setenv(name, value)
    assert keys(settings({"key": "k", "secret": "s"})) == ("k", "s", None)
    assert keys(settings({})) == ("env-key", "env-secret", "env-token")


@pytest.mark.parametrize("config", ["", "[default]\nregion = eu-north-1\n"])
def test_the_environment_beats_the_default_profile(
    aws: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    write(aws, "default", "file-key")
    (aws / "config").write_text(config)
    assert keys(settings({}))[0] == "file-key"
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert keys(settings({}))[0] == "env-key"
    assert settings({}).config.get("region") == ("eu-north-1" if config else None)


def test_a_profile_by_name_beats_the_environment(
    aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    write(aws, "lab", "lab-key")
    (aws / "config").write_text("[profile lab]\nregion = eu-west-3\n")
    found = settings({"profile": "lab"})
    assert keys(found)[0] == "lab-key"
    assert found.config["region"] == "eu-west-3"


@pytest.mark.parametrize(
    ("environment", "config", "expected"),
    [
        ({"AWS_ENDPOINT_URL": "http://general"}, "", "http://general"),
        (
            {"AWS_ENDPOINT_URL": "http://general", "AWS_ENDPOINT_URL_S3": "http://s3"},
            "",
            "http://s3",
        ),
        ({}, "[default]\nendpoint_url = http://file\n", "http://file"),
        (
            {},
            "[default]\nendpoint_url = http://file\nservices = mine\n"
            "[services mine]\ns3 =\n  endpoint_url = http://service\n",
            "http://service",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://env"},
            "[default]\nendpoint_url=http://f\n",
            "http://env",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://env", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            "",
            None,
        ),
        ({}, "", None),
    ],
)
def test_the_endpoint_is_boto3s(
    aws: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    config: str,
    expected: str | None,
) -> None:
    for name, value in {**ENVIRONMENT, "AWS_REGION": "us-east-1", **environment}.items():
        monkeypatch.setenv(name, value)
    (aws / "config").write_text(config)
    import boto3

    theirs = boto3.Session().client("s3").meta.endpoint_url
    assert settings({}).config.get("endpoint") == expected
    assert theirs == (expected or "https://s3.amazonaws.com") or expected is None
    explicit = settings({"endpoint_url": "http://explicit/"}).config
    assert explicit["endpoint"] == explicit["aws_endpoint_url_s3"] == "http://explicit"


def test_nested_options_of_fsspec(aws: Path) -> None:
    found = settings(
        {
            "key": "k",
            "secret": "s",
            "token": "t",
            "client_kwargs": {"endpoint_url": "http://e", "region_name": "r", "verify": False},
            "config_kwargs": {"s3": {"addressing_style": "virtual"}},
        }
    )
    assert keys(found) == ("k", "s", "t")
    assert found.config["region"] == "r"
    assert found.config["endpoint"] == "http://bucket.e"
    assert found.config["virtual_hosted_style_request"] is True
    assert found.verify is False
    assert settings({"anon": True}).provider is None


def test_what_obstore_has_no_word_for_is_left_to_fsspec(aws: Path) -> None:
    assert s3_settings("b", {"key": "k", "secret": "s", "default_fill_cache": False}) is None
    assert s3_settings("b", {"client_kwargs": {"api_version": "1"}}) is None


def test_no_credentials_at_all(aws: Path) -> None:
    with pytest.raises(AccessError, match="no credentials for s3://bucket: set key and secret"):
        settings({})
    with pytest.raises(ConfigError, match="nobody"):
        settings({"profile": "nobody"})


def test_secrets_are_in_no_repr(aws: Path) -> None:
    shown = repr(settings({"key": "open", "secret": "hidden", "token": "hidden"}))
    assert "hidden" not in shown


def test_a_store_opened_by_the_chain(
    aws: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("x", b"1")
    write(aws, "lab", "k")
    (aws / "config").write_text(f"[profile lab]\nendpoint_url = {bucket.server.endpoint}\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    store = open_store(SourceConfig(url=(bucket.url("*"),)))
    assert [entry.key for page in store.pages() for entry in page] == ["x"]


def test_static_keys_load_neither_boto3_nor_fsspec(bucket: Bucket) -> None:
    program = (
        "import sys; from growcache.config import SourceConfig\n"
        "from growcache.store.opening import open_store\n"
        f"source = SourceConfig(url='s3://b/x', storage_options={bucket.storage_options!r})\n"
        "open_store(source); open_store(SourceConfig(url='/tmp/x'))\n"
        "heavy = {'boto3', 'botocore', 'fsspec', 's3fs', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def write(folder: Path, profile: str, key: str) -> None:
    (folder / "credentials").write_text(
        f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = file-secret\n"
    )
