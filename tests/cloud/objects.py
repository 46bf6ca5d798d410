"""Put, find and erase objects by the providers' own clients, with the credentials that these find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit


@dataclass(frozen=True, order=True)
class Kept:
    """An object, or an older version of one, or the mark that one was deleted."""

    key: str
    version: str | None = None
    is_current: bool = True


class Objects(Protocol):
    """A bucket, for writing."""

    def put(self, key: str, data: bytes) -> None: ...
    def delete(self, key: str) -> None: ...
    def kept(self, prefix: str) -> Iterable[Kept]: ...
    def erase(self, one: Kept) -> None: ...


def open_objects(url: str, options: Mapping[str, Any]) -> Objects:
    """Return the bucket that a URL names; ValueError for a scheme that is no cloud's."""
    parts = urlsplit(url)
    kinds: dict[str, Callable[[str, Mapping[str, Any]], Objects]] = {
        **dict.fromkeys(("s3", "s3a"), S3Objects),
        **dict.fromkeys(("gs", "gcs"), GoogleObjects),
        **dict.fromkeys(("az", "abfs", "abfss"), AzureObjects),
    }
    if parts.scheme not in kinds or not parts.netloc:
        raise ValueError(f"expected s3://BUCKET, gs://BUCKET or az://CONTAINER, found {url!r}")
    return kinds[parts.scheme](parts.netloc, options)


def erase_all(objects: Objects, prefix: str) -> tuple[list[Kept], Exception | None]:
    """Erase all below a prefix; return what is left, and the last reason.

    Several rounds, because a deleted object may become an older version, to be erased in its turn.
    """
    problems: list[Exception] = []

    def erase(one: Kept) -> None:
        try:
            objects.erase(one)
        except Exception as problem:  # noqa: BLE001 - each client has its own
            problems.append(problem)

    left = sorted(objects.kept(prefix))
    for _ in range(3):
        if not left:
            return [], None
        problems.clear()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(erase, left))
        left = sorted(objects.kept(prefix))
    return left, problems[-1] if problems else None


class S3Objects:
    """Amazon's S3, or a server that speaks it, by boto3."""

    def __init__(self, bucket: str, options: Mapping[str, Any]) -> None:
        import boto3

        session = boto3.Session(
            profile_name=options.get("profile"),
            aws_access_key_id=options.get("key"),
            aws_secret_access_key=options.get("secret"),
            aws_session_token=options.get("token"),
        )
        endpoint = {"endpoint_url": options.get("endpoint_url")}
        self._client = session.client(
            "s3", **{**endpoint, **(options.get("client_kwargs") or {})}
        )
        self._request = {"Bucket": bucket}
        if options.get("requester_pays"):
            self._request["RequestPayer"] = "requester"

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(**self._request, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self._client.delete_object(**self._request, Key=key)

    def kept(self, prefix: str) -> Iterable[Kept]:
        from botocore.exceptions import ClientError

        try:
            return self._versions(prefix)
        except ClientError:  # without leave to list versions, or a server without them
            pages = self._client.get_paginator("list_objects_v2")
            found = pages.paginate(**self._request, Prefix=prefix)
            return [Kept(row["Key"]) for page in found for row in page.get("Contents", ())]

    def _versions(self, prefix: str) -> list[Kept]:
        pages = self._client.get_paginator("list_object_versions")
        return [
            Kept(row["Key"], row["VersionId"], row["IsLatest"])
            for page in pages.paginate(**self._request, Prefix=prefix)
            for row in (*page.get("Versions", ()), *page.get("DeleteMarkers", ()))
        ]

    def erase(self, one: Kept) -> None:
        version = {"VersionId": one.version} if one.version else {}
        self._client.delete_object(**self._request, Key=one.key, **version)


class GoogleObjects:
    """Google Cloud Storage, by Google's client."""

    def __init__(self, bucket: str, options: Mapping[str, Any]) -> None:
        from google.cloud import storage

        endpoint = options.get("endpoint_url")
        client = storage.Client(
            project=options.get("project", "growcache" if endpoint else None),
            credentials=self._credentials(options.get("token")),
            client_options={"api_endpoint": endpoint} if endpoint else None,
        )
        payer = options.get("requester_pays")
        payer = client.project if payer is True else payer or None
        self._bucket = client.bucket(bucket, user_project=payer)

    @staticmethod
    def _credentials(token: object) -> Any:
        from google import auth
        from google.auth import credentials

        untyped: Any = auth, credentials
        if token == "anon":
            return untyped[1].AnonymousCredentials()
        if isinstance(token, str) and token != "google_default":
            return untyped[0].load_credentials_from_file(token)[0]
        return None

    def put(self, key: str, data: bytes) -> None:
        self._bucket.blob(key).upload_from_string(data)

    def delete(self, key: str) -> None:
        self._bucket.blob(key).delete()

    def kept(self, prefix: str) -> Iterable[Kept]:
        found = self._bucket.list_blobs(prefix=prefix, versions=True)
        return [
            Kept(blob.name, str(blob.generation), blob.time_deleted is None) for blob in found
        ]

    def erase(self, one: Kept) -> None:
        self._bucket.blob(one.key, generation=int(one.version or 0) or None).delete()


class AzureObjects:
    """Azure's blobs, by Microsoft's client."""

    def __init__(self, container: str, options: Mapping[str, Any]) -> None:
        from azure.storage.blob import BlobServiceClient

        container, _, host = container.partition("@")
        if text := options.get("connection_string"):
            service = BlobServiceClient.from_connection_string(text)
        else:
            account = options.get("account_name") or host.partition(".")[0]
            address = options.get("endpoint_url") or f"https://{account}.blob.core.windows.net"
            service = BlobServiceClient(address, credential=self._credential(options))
        self._container = service.get_container_client(container)

    @staticmethod
    def _credential(options: Mapping[str, Any]) -> Any:
        import os

        stated = options.get("account_key") or options.get("sas_token")
        if found := stated or os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
            return found
        from azure.identity import DefaultAzureCredential

        return DefaultAzureCredential()

    def put(self, key: str, data: bytes) -> None:
        self._container.upload_blob(key, data, overwrite=True)

    def delete(self, key: str) -> None:
        self._container.delete_blob(key)

    def kept(self, prefix: str) -> Iterable[Kept]:
        from azure.core.exceptions import HttpResponseError

        with contextlib.suppress(HttpResponseError):  # an account without versions
            return self._listed(prefix, ["versions"])
        return self._listed(prefix, [])

    def _listed(self, prefix: str, include: list[str]) -> list[Kept]:
        found = self._container.list_blobs(name_starts_with=prefix, include=include)
        return [
            Kept(blob.name, blob.version_id, blob.is_current_version is not False)
            for blob in found
        ]

    def erase(self, one: Kept) -> None:
        if one.is_current:  # by its name, because Azure erases no current version by its id
            self._container.delete_blob(one.key, delete_snapshots="include")
        else:
            self._container.delete_blob(one.key, version_id=one.version)
