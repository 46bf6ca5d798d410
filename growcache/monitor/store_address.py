"""The address of an HTTP store, from a source's URL, its options and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from growcache.store.urls import S3_SCHEMES, WEB_SCHEMES, Location

_GOOGLE = "https://storage.googleapis.com"


def store_address(
    location: Location, options: Mapping[str, Any], environment: Mapping[str, str]
) -> str | None:
    """Return the address of a store that answers by HTTP, or None for others.

    >>> from growcache.store.urls import parse_url
    >>> store_address(parse_url("s3://b/*.npy"), {"endpoint_url": "http://minio:9000"}, {})
    'http://minio:9000'
    >>> store_address(parse_url("gs://b/*.npy"), {}, {})
    'https://storage.googleapis.com'
    >>> store_address(parse_url("/data/*.npy"), {}, {})
    """
    given = options.get("client_kwargs")
    for values in (options, given if isinstance(given, Mapping) else {}):
        for name in ("endpoint_url", "endpoint", "base_url"):
            if values.get(name):
                return str(values[name])
    if location.scheme in WEB_SCHEMES:
        return f"{location.scheme}://{location.bucket}"
    if location.scheme in S3_SCHEMES:
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        found = next(filter(None, map(environment.get, names)), None)
        return found or f"https://{location.bucket}.s3.amazonaws.com"
    return {"gs": _GOOGLE, "gcs": _GOOGLE}.get(location.scheme)
