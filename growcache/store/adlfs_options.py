"""``endpoint_url`` for adlfs, which ignores it and would send every request to Microsoft."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from growcache.errors import ConfigError
from growcache.store.urls import Location

AZURE_SCHEMES = ("az", "abfs", "abfss")


def adlfs_options(location: Location, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by which adlfs reaches the server of ``endpoint_url``.

    Raises:
        ConfigError: adlfs would reach it by https only, because there is no key or signature.

    >>> from growcache.store.urls import parse_url
    >>> adlfs_options(parse_url("az://c/*"), {"account_name": "a", "endpoint_url": "https://h"})
    {'account_name': 'a', 'account_host': 'h'}
    """
    others = dict(options)
    endpoint = str(others.pop("endpoint_url", None) or "")
    if not endpoint or others.get("connection_string"):
        return dict(options)
    credential = _credential(location, others)
    if credential:
        return {**others, "connection_string": f"BlobEndpoint={endpoint};{credential}"}
    scheme, _, host = endpoint.partition("://")
    if scheme != "https":
        raise ConfigError(
            "source.storage_options: with client: fsspec, an endpoint_url that begins with "
            "http:// needs account_name and account_key, or sas_token",
            code="GC215",
        )
    return {**others, "account_host": host}


def _credential(location: Location, options: Mapping[str, Any]) -> str:
    """Return a credential as a connection string has it; empty where there is none."""

    def found(name: str) -> str:
        return str(options.get(name) or os.environ.get(f"AZURE_STORAGE_{name.upper()}") or "")

    host = location.bucket.partition("@")[2]
    account = options.get("account_name") or host.partition(".")[0] or found("account_name")
    if account and (key := found("account_key")):
        return f"AccountName={account};AccountKey={key}"
    if token := found("sas_token"):
        return f"SharedAccessSignature={token.removeprefix('?')}"
    return ""
