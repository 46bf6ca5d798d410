"""Requests as S3 receives them: addresses, signatures, tokens, and the payer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.store.opening import open_store
from tests.servers import REGION
from tests.servers.threads import DATED, Handler, in_threads
from tests.store.places import only, read_once

CLIENTS = pytest.mark.parametrize(
    "client", ["obstore", pytest.param("fsspec", marks=pytest.mark.slow)]
)
LISTING = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>
<KeyCount>1</KeyCount><IsTruncated>false</IsTruncated><Contents><Key>d/x</Key><Size>5</Size>
<ETag>"e"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>
</ListBucketResult>"""
KEYS = {"key": "k", "secret": "s", "client_kwargs": {"region_name": REGION}}


@dataclass
class Recorder:
    """A server (and proxy) that answers everything alike and keeps its requests."""

    endpoint: str = ""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def paths(self) -> set[str]:
        """The paths of the requests, without queries."""
        return {path.partition("?")[0] for path, _ in self.asked}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()

    class Requests(Handler):
        def do_GET(self) -> None:
            made.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
            data = LISTING if "list-type" in self.path else b"12345"
            self.answer(200, data, {**DATED, "ETag": '"e"'})

    with in_threads(Requests) as made.endpoint:
        yield made


@pytest.fixture(autouse=True)
def _nobodys_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def ask(client: str, options: dict[str, Any], url: str = "s3://b/d/*") -> None:
    """List and read."""
    source = {"url": url, "client": client, "storage_options": options}
    store = open_store(SourceConfig.model_validate(source), timeout_seconds=1)
    assert read_once(store, only(store)) == b"12345"


@CLIENTS
def test_a_signature_and_a_session_token(recorder: Recorder, client: str) -> None:
    ask(client, {**KEYS, "token": "the-token", "endpoint_url": recorder.endpoint})
    assert len(recorder.asked) == 2
    for _, headers in recorder.asked:
        assert headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=k/")
        assert "x-amz-security-token" in headers["authorization"]
        assert headers["x-amz-security-token"] == "the-token"


@CLIENTS
def test_no_token_where_none_is_meant(
    recorder: Recorder, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-somebody-else")
    ask(client, {**KEYS, "endpoint_url": recorder.endpoint})
    assert all("x-amz-security-token" not in headers for _, headers in recorder.asked)


@CLIENTS
def test_anonymous(recorder: Recorder, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    ask(client, {"anon": True, "endpoint_url": recorder.endpoint})
    for _, headers in recorder.asked:
        assert not {"authorization", "x-amz-security-token"} & set(headers)


@CLIENTS
def test_a_profile_with_an_endpoint_and_a_token(
    recorder: Recorder, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        f"[profile lab]\nregion = eu-west-3\nendpoint_url = {recorder.endpoint}\n"
    )
    (tmp_path / ".aws" / "credentials").write_text(
        "[lab]\naws_access_key_id = lab-key\naws_secret_access_key = s\n"
        "aws_session_token = lab-token\n"
    )
    ask(client, {"profile": "lab"})
    monkeypatch.setenv("AWS_PROFILE", "lab")
    ask(client, {})
    assert len(recorder.asked) == 4
    for _, headers in recorder.asked:
        assert "Credential=lab-key/" in headers["authorization"]
        assert "/eu-west-3/s3/" in headers["authorization"]
        assert headers["x-amz-security-token"] == "lab-token"


@CLIENTS
def test_the_requester_pays(recorder: Recorder, client: str) -> None:
    ask(client, {**KEYS, "requester_pays": True, "endpoint_url": recorder.endpoint})
    assert [headers.get("x-amz-request-payer") for _, headers in recorder.asked] == [
        "requester"
    ] * 2


@CLIENTS
@pytest.mark.parametrize("end", ["", "/", "/store", "/store/"])
def test_an_endpoint_with_a_path_or_a_slash(recorder: Recorder, client: str, end: str) -> None:
    ask(client, {**KEYS, "endpoint_url": recorder.endpoint + end})
    base = end.rstrip("/")
    assert recorder.paths() == {f"{base}/b", f"{base}/b/d/x"}


@CLIENTS
@pytest.mark.parametrize("endpoint", ["http://storage.example", "http://lab.storage.example"])
def test_the_bucket_in_the_name_of_the_host(
    recorder: Recorder, client: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client == "fsspec" and endpoint.startswith("http://lab."):
        pytest.skip("boto3 puts the bucket before any host")
    monkeypatch.setenv("http_proxy", recorder.endpoint)
    style = {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}
    ask(client, {**KEYS, **style, "endpoint_url": endpoint}, "s3://lab/d/*")
    assert {headers["host"] for _, headers in recorder.asked} == {"lab.storage.example"}
    paths = {path.removeprefix("http://lab.storage.example") for path in recorder.paths()}
    assert paths == {"/", "/d/x"} or paths == {"", "/d/x"}
