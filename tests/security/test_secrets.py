"""No secret is shown, logged or kept, wherever a user may have put one and whatever fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import numpy as np
import pytest
import yaml

from growcache.config_text import load_config
from growcache.errors import ConfigError, StoreError
from growcache.secrecy import hash_secrets, hide_secrets, remember_secrets, url_without_secrets
from growcache.store.opening import open_store
from growcache.store.urls import parse_url
from tests.formats.held import Held
from tests.sampling.outcomes import npy
from tests.security.canaries import canary, found_in, growcache, told
from tests.servers import Bucket
from tests.servers.threads import Handler, in_threads

KEY = canary("key").removesuffix("/+x")  # these have letters and digits only
SECRET, TOKEN = canary("secret"), canary("token")
PASSWORD, SIGNATURE, HEADER = canary("password"), canary("signature"), canary("header")
SECRETS = (KEY, SECRET, TOKEN, PASSWORD, SIGNATURE, HEADER)


class Web(Handler):
    """One array under any name, for those who sign their address and name themselves."""

    data = npy(np.arange(64, dtype="<f4").reshape(16, 4))
    refuses = False

    def do_GET(self) -> None:
        signed = SIGNATURE in unquote(self.path)
        named = "Authorization" in self.headers
        if self.refuses or not (signed and named):
            self.send_error(403, f"{self.path} {self.headers.get('Authorization')}")
            return
        self.answer_object(self.data, {"ETag": '"one"'})

    do_HEAD = do_GET


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The signed address of an array on a web server that wants a user, too."""
    monkeypatch.setattr(Web, "refuses", False)
    signed = f"X-Amz-Date=1&X-Amz-Signature={quote(SIGNATURE, safe='')}&versionId=7"
    with in_threads(Web) as address:
        named = address.replace("//", f"//me:{quote(PASSWORD, safe='')}@")
        yield f"{named}/a.npy?{signed}"


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {**kept, **more}


def written(folder: Path, **source: Any) -> Path:
    path = folder / "config.yaml"
    cache = {"path": str(folder / "cache"), "max_bytes": "20MB", "min_free": 0}
    sampling = {"workers": 1, "timeout_seconds": 1, "shard_samples": 4}
    path.write_text(yaml.safe_dump({"source": source, "sampling": sampling, "cache": cache}))
    return path


@pytest.mark.slow
def test_a_signed_address_with_a_password(tmp_path: Path, web: str) -> None:
    config = written(tmp_path, url=web, options={"axis": 0})
    cache = tmp_path / "cache"
    ran = growcache(["run", str(config), "--until-full"], tmp_path, environment())
    assert ran.code == 0, ran.errors
    assert len(ran.commands) > 0
    assert found_in(SECRETS, ran, cache) == []
    identity = json.loads((cache / "identity.json").read_bytes())
    (url,) = identity["parts"]["source.url"]
    assert url == f"http://127.0.0.1:{urlsplit(web).port}/a.npy?versionId=7"
    for words in (
        ["peek", "cache", "--sample", "0:0", "--json"],
        ["peek", "cache", "--sample", "0:0", "--refetch"],
        ["export", "cache", "copy"],
    ):
        ran = growcache(words, tmp_path, environment())
        assert found_in(SECRETS, ran, cache) == []
    assert found_in(SECRETS, None, tmp_path / "copy") == []


def test_an_address_that_is_refused(tmp_path: Path, web: str) -> None:
    Web.refuses = True
    ran = growcache(["run", str(written(tmp_path, url=web))], tmp_path, environment())
    assert ran.code == 2
    assert b"may not be read" in ran.errors
    assert found_in(SECRETS, ran, tmp_path / "cache") == []


@pytest.mark.slow
def test_s3_with_keys_in_options_arguments_and_variables(
    tmp_path: Path, bucket: Bucket
) -> None:
    for number in range(8):
        bucket.put(f"{number}.npy", npy(np.full((4, 4), number, np.float32)))
    bucket.put("bad.npy", b"no array")
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, api_token):\n"
        "        self.api_token = api_token\n"
        "    def __call__(self, sample, origin):\n"
        "        if origin.key.startswith('3'):\n"
        "            raise RuntimeError('refused with ' + self.api_token)\n"
        "        return sample\n"
    )
    options = {"key": KEY, "endpoint_url": bucket.server.endpoint}
    config = written(tmp_path, url=bucket.url("*.npy"), storage_options=options)
    values = yaml.safe_load(config.read_text())
    values["sampling"] |= {
        "transform": "mine:Mine",
        "transform_options": {"api_token": TOKEN},
        "max_skipped": 0.9,
    }
    config.write_text(yaml.safe_dump(values))
    given = ["run", str(config), "--until-full", "--set"]
    given.append(f"source.storage_options.secret={SECRET}")
    variable = {"GROWCACHE_SOURCE__STORAGE_OPTIONS__TOKEN": HEADER}
    ran = growcache(given, tmp_path, environment(**variable))
    assert ran.code == 0, ran.errors
    cache = tmp_path / "cache"
    assert found_in(SECRETS, ran, cache) == []
    holes = [json.loads(path.read_bytes()) for path in cache.glob("shards/*.json")]
    reasons = [hole[2] for shard in holes for hole in shard["sidecar"]["holes"]]
    assert any("refused with HIDDEN" in reason for reason in reasons)
    for words in (["status", "cache"], ["status", "cache", "--json"], ["check", "cache"]):
        assert found_in(SECRETS, growcache(words, tmp_path, environment()), cache) == []


def service_errors() -> dict[str, dict[str, Any]]:
    """Sources that fail once they are asked, by what is wrong."""
    s3 = {"key": KEY, "secret": SECRET, "token": TOKEN}
    gone = "http://127.0.0.1:9"
    return {
        "no server": {"url": "s3://b/*", "storage_options": {**s3, "endpoint_url": gone}},
        "a user in the endpoint": {
            "url": "s3://b/*",
            "storage_options": {
                **s3,
                "endpoint_url": f"http://me:{quote(PASSWORD, safe='')}@127.0.0.1:9",
            },
        },
        "no server, by fsspec": {
            "url": "s3://b/*",
            "storage_options": {**s3, "endpoint_url": gone},
            "client": "fsspec",
        },
        "an option that nobody knows": {
            "url": "s3://b/*",
            "storage_options": {**s3, "sekret": HEADER, "endpoint_url": gone},
        },
        "an endpoint that is none": {
            "url": "s3://b/*",
            "storage_options": {**s3, "endpoint_url": f"me:{PASSWORD}@minio"},
            "client": "fsspec",
        },
        "keys that are no texts": {
            "url": "s3://b/*",
            "storage_options": {"key": [KEY], "secret": {"is": SECRET}, "endpoint_url": gone},
        },
        "a region that is none": {
            "url": "s3://b/*",
            "storage_options": {**s3, "endpoint_url": gone, "region": {"token": TOKEN}},
        },
        "a header": {
            "url": "http://127.0.0.1:9/a.npy",
            "storage_options": {"headers": {"Authorization": f"Bearer {HEADER}"}},
        },
        "a password over SSH": {"url": f"sftp://me:{PASSWORD}@127.0.0.1:9/a/*.npy"},
        "a chain": {"url": f"simplecache::http://me:{quote(PASSWORD, safe='')}@127.0.0.1:9/a"},
        "a signature on Azure": {
            "url": "az://c/*.npy",
            "storage_options": {"account_name": "a", "sas_token": SIGNATURE},
        },
        "Google's token": {"url": "gs://b/*.npy", "storage_options": {"token": {"x": TOKEN}}},
        "keys in the address": {"url": f"s3://{KEY}:{SECRET}@bucket/*.npy"},
    }


@pytest.mark.parametrize("case", service_errors())
def test_a_store_that_fails_does_not_tell(case: str) -> None:
    source = service_errors()[case]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, it must not tell
        _listed(source)
    told_of = [secret for secret in SECRETS if told(secret, str(caught.value).encode())]
    assert told_of == []
    assert isinstance(caught.value, ConfigError | StoreError), repr(caught.value)


def _listed(source: dict[str, Any]) -> None:
    config = load_config({"source": source})
    store = open_store(config.sources[0], timeout_seconds=0.3)
    list(store.pages())


@pytest.mark.parametrize(
    "text",
    [
        f"source: http://me:{quote(PASSWORD)}@host/x",
        f"source: {{url: [1, 'http://me:{quote(PASSWORD)}@host/x']}}",
        f"source: {{url: x, storage_options: {SECRET}}}",
        f"source: {{url: x, storage_options: [{SECRET}]}}",
        f"source: {{url: x, storage_options: {{secret: *{SECRET}}}}}",
        f"source: {{url: x, storage_options: {{secret: !{SECRET} x}}}}",
        f"source: {{url: x, storage_options: {{secret: '{SECRET}}}}}",
        f"source: {{url: x, storage_options: {{secret: @{SECRET}}}}}",
        f'source: {{url: x, storage_options: {{secret: "\\{SECRET}"}}}}',
        f"source: {{url: x, client: {{secret: {SECRET}}}}}",
        f"sampling: {{seed: 's3://{KEY}:{SECRET}@b'}}\nsource: {{url: x}}",
        f"storage_options: {{secret: {SECRET}}}\nsource: {{url: x}}",
        f"source: {{url: x, secret: {SECRET}}}",
        f"source: {{url: x, format: 'https://h/a?sig={SIGNATURE}'}}\ncache: []",
    ],
)
def test_a_config_that_cannot_be_meant_does_not_tell(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [secret for secret in SECRETS if told(secret, str(caught.value).encode())] == []


@pytest.mark.parametrize(
    "override",
    [
        f"source.storage_options.secret:{SECRET}",
        f"source.storage_options.secret=[{SECRET}",
        f"source.storage_options.secret=!{SECRET} x",
        f"source.storage_options={SECRET}",
        f"source.url=[3, 's3://{KEY}:{SECRET}@b/x']",
        f"source.url=s3://{KEY}:{SECRET}@b/x",
    ],
)
def test_an_override_that_cannot_be_meant_does_not_tell(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(load_config({"source": {"url": "x"}}, [override]).sources[0].url[0])
    assert [secret for secret in SECRETS if told(secret, str(caught.value).encode())] == []


def test_what_is_kept_of_addresses_and_options() -> None:
    assert (
        url_without_secrets("zip://x.npy::https://me:pa/ss@w@host/a")
        == "zip://x.npy::https://host/a"
    )
    assert url_without_secrets("https://h/a?sv=1&sp=r&sig=x&page=2") == "https://h/a?page=2"
    assert (
        url_without_secrets("https://h/a?sv=1&sp=r") == "https://h/a?sv=1&sp=r"
    )  # it has no signature
    one, other = (hash_secrets({"api_key": secret, "axis": 0}) for secret in (SECRET, TOKEN))
    assert one["axis"] == 0
    assert one != other  # samples may differ
    assert not told(SECRET, str(one).encode())
    assert hash_secrets({"key": "path", "url": "s3://b"}) == {"key": "path", "url": "s3://b"}


def test_what_is_hidden_and_what_is_not() -> None:
    remember_secrets(
        {"storage_options": {"secret": "swordfish", "key": "abc", "password": "rabbit"}}
    )
    assert hide_secrets("the swordfishes, a rabbit, rabbits and abc") == (
        "the HIDDENes, a HIDDEN, rabbits and abc"
    )


def test_an_object_of_a_signed_address_has_a_key_that_tells_nothing(web: str) -> None:
    location = parse_url(web)
    assert location.pattern == "a.npy?versionId=7"
    assert not any(told(secret, repr(location).encode()) for secret in SECRETS)
    other = web.replace("/a.npy", "/b.npy")
    config = load_config({"source": {"url": [web, other, web.replace("=7", "=8")]}})
    pages = [entry for page in open_store(config.sources[0]).pages() for entry in page]
    keys = [(entry.key, entry.store) for entry in pages]
    expected = ["a.npy?versionId=7", "b.npy?versionId=7", "a.npy?versionId=8"]
    assert keys == [(key, number) for number, key in enumerate(expected)]
    assert Held(Web.data).entry.size == pages[0].size
