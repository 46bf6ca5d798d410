"""Azure's settings: the names of adlfs, of connection strings and of addresses, in obstore's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from growcache.errors import ConfigError

_PUBLIC = "core.windows.net"
_OF_ADLFS = {"sas_token": "sas_key", "anon": "skip_signature", "endpoint_url": "endpoint"}
_OF_STRINGS = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
_KNOWN = frozenset(
    {"account_name", "account_key", "sas_key", "skip_signature", "endpoint", "use_emulator",
     "client_id", "client_secret", "tenant_id"}
)  # fmt: skip


def azure_settings(host: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return obstore's settings; None where it has no word for an option or the host.

    Args:
        host: what stands behind the container, as in ``abfss://CONTAINER@HOST/``; or empty.
        options: ``storage_options``. They win over the host and the connection string.

    Raises:
        ConfigError: a connection string that names no account.
    """
    found = account(host) if host else {}
    if found is None:
        return None
    given = {name: value for name, value in options.items() if value is not None}
    if (text := given.pop("connection_string", None)) is not None:
        found |= connection_string(str(text))
    found |= {_OF_ADLFS.get(name, name): value for name, value in given.items()}
    return found if set(found) <= _KNOWN else None


def account(host: str) -> dict[str, Any] | None:
    """Return what the name of a host says; None where it is none of Azure's usual ones.

    >>> account("a.dfs.core.windows.net")
    {'account_name': 'a'}
    >>> account("a.dfs.core.chinacloudapi.cn")["endpoint"]
    'https://a.blob.core.chinacloudapi.cn'
    >>> account("onelake.dfs.fabric.microsoft.com")
    """
    found = re.fullmatch(r"([a-z0-9]+)\.(?:dfs|blob)\.(core\.[a-z.]+)", host)
    return found and _within({"account_name": found[1]}, "https", found[2])


def connection_string(text: str) -> dict[str, Any]:
    """Return what a connection string says.

    Raises:
        ConfigError: it names no account.

    >>> connection_string("AccountName=a;AccountKey=b==;BlobEndpoint=http://h/a;")
    {'account_name': 'a', 'account_key': 'b==', 'endpoint': 'http://h/a'}
    """
    said = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    found = {own: said[name] for name, own in _OF_STRINGS.items() if name in said}
    if "account_name" not in found and "endpoint" not in found:
        raise ConfigError(
            "source.storage_options: expected a connection_string with AccountName=…;AccountKey=…"
        )
    scheme = said.get("DefaultEndpointsProtocol", "https")
    return _within(found, scheme, said.get("EndpointSuffix", _PUBLIC))


def _within(found: dict[str, Any], scheme: str, suffix: str) -> dict[str, Any]:
    """Add the address of an account in a cloud that is not the public one, unless it has one."""
    if suffix == _PUBLIC or "account_name" not in found:
        return found
    return {"endpoint": f"{scheme}://{found['account_name']}.blob.{suffix}", **found}
