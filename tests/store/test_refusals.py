"""The message for a refusal: one line that says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    CredentialsError,
    ObjectMissingError,
    StoreError,
    StoreMissingError,
)
from growcache.errors import TransientStoreError as Transient
from growcache.store.contract import Entry
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from growcache.store.store_errors import (
    CONNECTION_REFUSED,
    TIMED_OUT,
    UNKNOWN_HOST,
    UNTRUSTED_CERTIFICATE,
    FailedRequest,
    store_error,
)
from tests.servers import Bucket, free_port

CLIENTS = pytest.mark.parametrize("client", ["obstore", "fsspec"])


def opened(
    url: str, client: str, options: dict[str, Any], *, timeout_seconds: float = 2
) -> RemoteStore:
    source = SourceConfig.model_validate(
        {"url": url, "client": client, "storage_options": options}
    )
    return open_store(source, timeout_seconds=timeout_seconds)


def listed(store: RemoteStore) -> list[Entry]:
    return [entry for page in store.pages() for entry in page]


def assert_clear(error: StoreError, *words: str) -> None:
    said = str(error)
    assert all(word in said for word in words), said
    assert "\n" not in said
    assert len(said) < 250
    assert error.exit_code == 2


@CLIENTS
def test_a_bucket_that_is_not_there(s3: Bucket, client: str) -> None:
    store = opened("s3://no-such-bucket/**", client, s3.storage_options)
    with pytest.raises(ObjectMissingError) as caught:
        listed(store)
    assert_clear(caught.value, "s3://no-such-bucket does not exist", "source.url")


@CLIENTS
@pytest.mark.ceph
@pytest.mark.parametrize("wrong", [{"secret": "not-the-secret"}, {"key": "nobody"}])
def test_wrong_keys(ceph_bucket: Bucket, client: str, wrong: dict[str, str]) -> None:
    ceph_bucket.put("x", b"1")
    store = opened(ceph_bucket.url("**"), client, ceph_bucket.storage_options | wrong)
    with pytest.raises(AccessError) as caught:
        listed(store)
    assert_clear(caught.value, ceph_bucket.name, "refuses the credentials", "key and secret")
    assert all(secret not in str(caught.value) for secret in wrong.values())
    with pytest.raises(AccessError):
        asyncio.run(store.read(Entry("x", 1, None, None)))


@CLIENTS
@pytest.mark.ceph
def test_a_private_bucket_read_by_a_stranger(ceph_bucket: Bucket, client: str) -> None:
    options = {"anon": True, "endpoint_url": ceph_bucket.server.endpoint}
    with pytest.raises(AccessError) as caught:
        listed(opened(ceph_bucket.url("**"), client, options))
    assert_clear(caught.value, ceph_bucket.name, "may not be read", "403")


@CLIENTS
@pytest.mark.ceph
def test_a_public_bucket_read_by_a_stranger(ceph_bucket: Bucket, client: str) -> None:
    ceph_bucket.client.put_bucket_acl(Bucket=ceph_bucket.name, ACL="public-read")
    name = {"Bucket": ceph_bucket.name, "Key": "x", "Body": b"1", "ACL": "public-read"}
    ceph_bucket.client.put_object(**name)
    options = {"anon": True, "endpoint_url": ceph_bucket.server.endpoint}
    store = opened(ceph_bucket.url("*"), client, options)
    (entry,) = listed(store)
    assert bytes(memoryview(asyncio.run(store.read(entry)))) == b"1"


@CLIENTS
def test_nobody_there(client: str) -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{free_port()}"}
    failures: list[BaseException] = []
    source = SourceConfig.model_validate(
        {"url": "s3://bucket/**", "client": client, "storage_options": options}
    )
    store = open_store(source, timeout_seconds=1, on_retry=failures.append)
    with pytest.raises(Transient, match=r"s3://bucket.* given up after \d+ tries") as caught:
        listed(store)
    assert "\n" not in str(caught.value)
    assert failures
    assert all(isinstance(failure, Transient) for failure in failures)


@pytest.mark.parametrize("url", ["{}/x.npy", "{}/*.npy"])
def test_nobody_there_on_the_web(url: str) -> None:
    """fsspec calls it "not found", which would end a run that only has to wait."""
    address = url.format(f"http://127.0.0.1:{free_port()}")
    store = opened(address, "fsspec", {}, timeout_seconds=0.5)
    with pytest.raises(Transient, match=r"connection refused by 127\.0\.0\.1.*given up after"):
        listed(store)


def test_a_key_that_obstore_cannot_name(bucket: Bucket) -> None:
    bucket.put("a//b", b"1")
    with pytest.raises(StoreError, match=r"use source\.client: auto or fsspec"):
        read_all(opened(bucket.url("**"), "obstore", bucket.storage_options))
    assert read_all(opened(bucket.url("**"), "auto", bucket.storage_options)) == [b"1"]


def read_all(store: RemoteStore) -> list[bytes]:
    return [bytes(memoryview(asyncio.run(store.read(entry)))) for entry in listed(store)]


def test_a_folder_is_no_object(tmp_path: Any) -> None:
    with pytest.raises(ObjectMissingError, match=r"end source\.url with /"):
        listed(opened(str(tmp_path), "auto", {}))
    with pytest.raises(ObjectMissingError, match="no folder") as caught:
        listed(opened(f"{tmp_path}/nowhere/*.npy", "auto", {}))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"url": "s3://"}, "s3://BUCKET/KEY"),
        ({"url": "s3://buck*/x"}, "one bucket"),
        ({"url": "s3://bucket/a**b"}, "whole component"),
        ({"url": "nosuch://x/y"}, "nosuch"),
        ({"url": "sftp://h/x", "client": "obstore"}, "client: auto or fsspec"),
        ({"url": "s3://b/x", "storage_options": {"key": "only"}}, "found only key"),
        ({"url": "s3://b/x", "storage_options": {"secret": "only"}}, "found only secret"),
        ({"url": "s3://b/x", "client": "obstore", "storage_options": {"keey": 1}}, "fsspec"),
    ],
)
def test_sources_that_cannot_be_meant(source: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_store(SourceConfig.model_validate(source))


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            FailedRequest("E", 301, "PermanentRedirect", region="eu-west-1"),
            CredentialsError,
            "eu-west-1",
        ),
        (FailedRequest("E", 400, "ExpiredToken"), CredentialsError, "expired"),
        (FailedRequest("E", 403, "RequestTimeTooSkewed"), CredentialsError, "clock"),
        (
            FailedRequest("E", 403, "InvalidAccessKeyId"),
            CredentialsError,
            "refuses the credentials",
        ),
        (
            FailedRequest("E", 403, "AccessDenied"),
            AccessError,
            "s3://bucket/key may not be read",
        ),
        (FailedRequest("E", 401), AccessError, "s3://bucket/key refuses the credentials"),
        (
            FailedRequest("E", 404, "NoSuchBucket"),
            StoreMissingError,
            "s3://bucket does not exist",
        ),
        (
            FailedRequest("E", 404, "NoSuchKey"),
            ObjectMissingError,
            "s3://bucket/key does not exist",
        ),
        (FailedRequest("E", 503, "SlowDown"), Transient, "503 SlowDown"),
        (FailedRequest("E", 429), Transient, "429"),
        (FailedRequest("E", 400, "RequestTimeout"), Transient, "RequestTimeout"),
        (FailedRequest("E", None, cause="the connection was reset"), Transient, "was reset"),
        (
            FailedRequest("E", cause=UNTRUSTED_CERTIFICATE),
            CredentialsError,
            "{client_kwargs: {verify: FILE}}",
        ),
        (FailedRequest("E", 400, "MalformedXML"), StoreError, "answered 400 MalformedXML"),
        (FailedRequest("E", 418), StoreError, "answered 418"),
    ],
)
def test_what_answers_mean(answer: FailedRequest, kind: Callable[..., Any], words: str) -> None:
    error = store_error(answer, "s3://bucket/", "key")
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (FailedRequest("E", 403), "s3://bucket may not be read"),
        (FailedRequest("E", 401), "s3://bucket refuses the credentials"),
    ],
)
def test_a_refused_listing_is_about_no_key(answer: FailedRequest, words: str) -> None:
    error = store_error(answer, "s3://bucket/", "")
    assert type(error) is CredentialsError
    assert words in str(error)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            CONNECTION_REFUSED,
            "connection refused by minio:9 (endpoint_url in source.storage_options)",
        ),
        (UNKNOWN_HOST, "unknown host minio:9 (endpoint_url in source.storage_options)"),
        (TIMED_OUT, "no answer in time from minio:9 (endpoint_url in source.storage_options)"),
    ],
)
def test_who_did_not_answer_is_named_with_the_option(cause: str, words: str) -> None:
    option = "endpoint_url in source.storage_options"
    answer = FailedRequest("E", cause=cause, address="minio:9")
    assert words in str(store_error(answer, "s3://bucket/", "key", option))
