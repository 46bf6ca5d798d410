"""Google's and Microsoft's stores: versions, pages, and the ways to name account and key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.errors import AccessError, ObjectChangedError, ObjectMissingError
from growcache.store.store import RemoteStore, open_store
from tests.servers.azure import ACCOUNT, KEY, Azure, AzureContainer
from tests.servers.imagined_gcs import ImaginedGcs, imagined_gcs
from tests.store.places import listed, only, read_once

AZURE = pytest.mark.slow  # `make test-slow` installs what they need


def opened(url: str, options: dict[str, Any]) -> RemoteStore:
    source = SourceConfig.model_validate({"url": url, "storage_options": options})
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
def test_the_ways_to_name_an_account(
    azure_server: Azure, container: AzureContainer, monkeypatch: pytest.MonkeyPatch
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
        entry = only(opened(url, options))
        etags.add(entry.etag)
        assert (entry.key, entry.size) == ("d/x", 5)
        assert read_once(opened(url, options), entry) == b"12345"
    assert len(etags) == 1  # the listing and HEAD name a version alike
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    assert only(opened(f"az://{container.name}/d/*", endpoint)).size == 5


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
