"""Google's and Microsoft's stores: versions, pages, and the ways to name account and key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.errors import AccessError, ConfigError, ObjectChangedError, ObjectMissingError
from growcache.store.adlfs_options import adlfs_options
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from growcache.store.urls import parse_url
from tests.servers.azure import ACCOUNT, KEY, Azure, AzureContainer
from tests.servers.imagined_gcs import ImaginedGcs, imagined_gcs
from tests.store.places import listed, only, read_once

AZURE = pytest.mark.slow  # `make test-slow` installs what they need


def opened(url: str, options: dict[str, Any], client: str = "auto") -> RemoteStore:
    settings = {"url": url, "storage_options": options, "client": client}
    source = SourceConfig.model_validate(settings)
    return open_store(source, timeout_seconds=2)


@pytest.fixture
def google() -> Iterator[ImaginedGcs]:
    with imagined_gcs() as state:
        yield state


def test_google_is_listed_by_pages_that_begin_where_they_should(google: ImaginedGcs) -> None:
    google.objects = {f"d/{n:05}.npy": b"%d" % n for n in range(2500)} | {"e": b"", "c": b"1"}
    options = {"endpoint_url": google.endpoint, "token": "anon"}
    found = listed(opened("gs://b/d/*.npy", options))
    assert sorted(entry.key for entry in found) == sorted(
        key for key in google.objects if key.startswith("d/")
    )
    assert len({entry.key for entry in found}) == len(found)
    assert all(query["prefix"] == "d/" for query in google.listings)
    assert any("start-after" in query for query in google.listings)


@pytest.mark.parametrize("limits", [(), (1, 3)])
def test_google_is_asked_for_the_version_that_was_listed(
    google: ImaginedGcs, limits: tuple[int, ...]
) -> None:
    options = {"endpoint_url": google.endpoint, "anon": True}
    google.objects["x"] = b"old1"
    entry = only(opened("gs://b/*", options))
    store = opened("gs://b/*", options)
    assert read_once(store, entry, *limits) == (b"ld" if limits else b"old1")
    google.objects["x"] = b"new1"
    with pytest.raises(ObjectChangedError, match="rewritten"):
        read_once(store, entry, *limits)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "refuses the credentials .*GOOGLE_APPLICATION_CREDENTIALS"),
        (403, "may not be read with these credentials"),
    ],
)
def test_google_says_no(google: ImaginedGcs, status: int, words: str) -> None:
    google.refusal = (status, b"<Error><Code>AccessDenied</Code></Error>")
    with pytest.raises(AccessError, match=words) as caught:
        listed(opened("gs://b/*", {"endpoint_url": google.endpoint, "anon": True}))
    assert "AWS" not in str(caught.value)


def test_a_bucket_that_is_not_there(google: ImaginedGcs) -> None:
    with pytest.raises(ObjectMissingError, match="gs://nowhere does not exist"):
        listed(opened("gs://nowhere/*", {"endpoint_url": google.endpoint, "anon": True}))


@pytest.fixture
def container(azure_server: Azure) -> AzureContainer:
    made = AzureContainer.make(azure_server)
    made.put("d/x", b"12345")
    return made


@AZURE
@pytest.mark.parametrize("client", ["auto", "fsspec"])
def test_the_ways_to_name_an_account(
    azure_server: Azure, container: AzureContainer, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    endpoint = {"endpoint_url": azure_server.endpoint}
    string = {"connection_string": azure_server.connection_string}
    full = f"{container.name}@{ACCOUNT}.dfs.core.windows.net"
    etags = set()
    for url, options in [
        (f"az://{container.name}/d/*", azure_server.options),
        (f"abfs://{container.name}/d/x", string),
        (f"abfss://{full}/d/*", {"account_key": KEY, **endpoint}),
        (f"az://{container.name}/d/*", {"sas_token": signature(container), **endpoint}
            | {"account_name": ACCOUNT}),
    ]:  # fmt: skip
        entry = only(opened(url, options, client))
        etags.add(entry.etag)
        assert (entry.key, entry.size) == ("d/x", 5)
        assert read_once(opened(url, options, client), entry) == b"12345"
    assert len(etags) == 1  # the listing and HEAD name a version alike
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    assert only(opened(f"az://{container.name}/d/*", endpoint, client)).size == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"anon": True}, {"anon": True}),
        ({"endpoint_url": "https://h/a"}, {"account_host": "h/a"}),
        (
            {"endpoint_url": "http://h", "account_key": "k=="},
            {
                "account_key": "k==",
                "connection_string": "BlobEndpoint=http://h;AccountName=own;AccountKey=k==",
            },
        ),
        (
            {"endpoint_url": "http://h", "sas_token": "?sv=1"},
            {
                "sas_token": "?sv=1",
                "connection_string": "BlobEndpoint=http://h;SharedAccessSignature=sv=1",
            },
        ),
    ],
)
def test_adlfs_goes_to_the_server_of_endpoint_url(
    options: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    location = parse_url("abfss://c@own.dfs.core.windows.net/*")
    assert adlfs_options(location, options) == expected


def test_adlfs_has_no_http_without_a_key() -> None:
    with pytest.raises(ConfigError, match="http:// needs account_name and account_key"):
        adlfs_options(parse_url("az://c/*"), {"endpoint_url": "http://h", "anon": True})


def signature(container: AzureContainer) -> str:
    from datetime import UTC, datetime, timedelta

    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    made = generate_container_sas(
        ACCOUNT,
        container.name,
        account_key=KEY,
        permission=ContainerSasPermissions(read=True, list=True),
        expiry=datetime.now(UTC) + timedelta(hours=1),
    )
    return str(made)


@AZURE
def test_a_wrong_key_of_azure(azure_server: Azure, container: AzureContainer) -> None:
    wrong = azure_server.options | {"account_key": "bm90IHRoZSBrZXk="}
    for pattern in ("d/*", "d/x"):
        with pytest.raises(AccessError) as caught:
            listed(opened(f"az://{container.name}/{pattern}", wrong))
        assert "AWS" not in str(caught.value)
        assert "\n" not in str(caught.value)


@AZURE
def test_a_folder_of_azures(azure_server: Azure, container: AzureContainer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: container.put(f"many/{n:02}", b"1"), range(12)))
    found = listed(opened(f"az://{container.name}/many/", azure_server.options))
    assert sorted(entry.key for entry in found) == [f"many/{n:02}" for n in range(12)]
