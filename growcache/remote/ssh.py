"""Connections to an SSH server: whom it is believed to be, and what its refusals mean."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from growcache.errors import ConfigError, CredentialsError, StoreError, TransientStoreError
from growcache.remote.urls import Location
from growcache.usercode import short

# As OpenSSH's client has them; the first that knows a host is believed.
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")
_POLICIES = ("auto_add", "reject")  # fsspec's names


@dataclass(frozen=True)
class SshServer:
    """A host, and what else paramiko's ``connect`` is told.

    Attributes:
        host: its name.
        url: its address as messages have it.
        settings: of ``connect``; they may be secret.
        is_strict: whether a host that no known_hosts has is refused.
        stalled: seconds without a byte after which a connection is given up.
    """

    host: str
    url: str
    settings: Mapping[str, Any] = field(repr=False)
    is_strict: bool
    stalled: float

    @property
    def identity(self) -> str:
        """What tells its files from those of another host or user."""
        user, port = self.settings.get("username", ""), self.settings.get("port", 22)
        return f"ssh://{user}@{self.host}:{port}"

    def connect(self) -> Connection:
        """Return a new connection.

        Raises:
            CredentialsError: the server lets nobody in with these credentials, a key's file cannot
            be read, or the server is another one.
            ConfigError: an option of the wrong kind.
            TransientStoreError: no answer, or one that broke off.
        """
        from paramiko import SSHClient

        client = SSHClient()
        client.set_missing_host_key_policy(_Unknown(self))
        try:
            for path in (Path(name).expanduser() for name in _KNOWN_HOSTS):
                if path.is_file():
                    client.load_system_host_keys(str(path))
            client.connect(self.host, **self.settings)
            sftp = client.open_sftp()
        except Exception as error:
            explained = self._explained(error, client.get_transport())
            client.close()
            if explained is None:
                raise
            raise explained from None
        sftp.get_channel().settimeout(self.stalled)
        return Connection(client, sftp)

    def _explained(self, error: Exception, transport: Any) -> Exception | None:
        """Return growcache's error; None where it is a bug."""
        from paramiko.ssh_exception import BadHostKeyException, SSHException

        if isinstance(error, StoreError):
            return error
        if isinstance(error, BadHostKeyException):
            return CredentialsError(
                f"{self.url} shows another key than known_hosts has for it; if that is meant, "
                f"run: ssh-keygen -R {self.known_as}, and connect once by ssh"
            )
        if isinstance(error, SSHException) and _answers(transport, error):
            return self._refusal(error, is_in=transport.is_authenticated())
        if isinstance(error, FileNotFoundError | PermissionError) and error.filename:
            return CredentialsError(
                f"{self.url}: {error.filename} of source.storage_options cannot be read "
                f"({error.strerror})"
            )
        if isinstance(error, TypeError | ValueError):  # its text may hold secrets
            return ConfigError(
                f"source {self.url}: its storage_options were refused ({type(error).__name__})"
            )
        # What is neither the system's nor of the language itself is paramiko's own.
        if isinstance(error, OSError | EOFError) or type(error).__module__ != "builtins":
            return TransientStoreError(f"{self.url}: {self._no_connection(error)}")
        return None

    def _no_connection(self, error: BaseException) -> str:
        failed = getattr(error, "errors", None)  # paramiko's: of each address that was tried
        first = next(iter(failed.values()), error) if isinstance(failed, dict) else error
        if isinstance(first, ConnectionRefusedError):
            return f"connection refused by {self.host}:{self.settings.get('port', 22)} (source.url)"
        return f"no connection ({words(error)})"

    def _refusal(self, error: Exception, *, is_in: bool) -> CredentialsError:
        from paramiko.ssh_exception import PasswordRequiredException

        if is_in:
            return CredentialsError(
                f"{self.url} lets this user in, and offers no SFTP ({words(error)})"
            )
        # Of several keys the last failure is told, be it only that a file holds another kind.
        if isinstance(error, PasswordRequiredException):
            return CredentialsError(
                f"{self.url}: the private key is encrypted; set passphrase in "
                "source.storage_options, or use an agent"
            )
        return CredentialsError(
            f"{self.url} refuses the user or the key ({words(error)}); check username, "
            "key_filename, passphrase and password in source.storage_options, or the keys in "
            "~/.ssh and the agent"
        )

    @property
    def known_as(self) -> str:
        """Its name in known_hosts."""
        port = self.settings.get("port", 22)
        return self.host if port == 22 else f"[{self.host}]:{port}"


@dataclass(frozen=True)
class Connection:
    """An open one; who keeps ``sftp`` alone loses it, for it ends with its client."""

    client: Any
    sftp: Any

    def close(self) -> None:
        """End it."""
        self.client.close()


class _Unknown:
    """What paramiko asks of a host that no known_hosts has; it refuses changed keys itself."""

    def __init__(self, server: SshServer) -> None:
        self._server = server

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        """See `paramiko.MissingHostKeyPolicy`."""
        if self._server.is_strict:
            raise CredentialsError(
                f"{self._server.url} is not in ~/.ssh/known_hosts, and host_key_policy is "
                "reject; connect once by ssh"
            )


def ssh_server(
    url: str, location: Location, options: Mapping[str, Any], stalled: float
) -> SshServer:
    """Return the server of a URL.

    Args:
        url: with user and password, where it has them.
        location: what it means.
        options: as paramiko's ``connect`` has them, and ``host_key_policy``.
        stalled: seconds without a byte after which an attempt is given up.

    Raises:
        ConfigError: paramiko is missing, the URL names no host, or an option is unknown.
    """
    try:
        from paramiko import SSHClient
    except ImportError:
        raise ConfigError(
            f"source.url {location.url}: SFTP needs paramiko: pip install 'growcache[sftp]'"
        ) from None
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # prints tracebacks of its own
    options = dict(options)
    policy = options.pop("host_key_policy", "auto_add")
    if policy not in _POLICIES:
        raise ConfigError(
            f"source.storage_options: expected a host_key_policy of {' or '.join(_POLICIES)}"
        )
    known = set(inspect.signature(SSHClient.connect).parameters) - {"self", "hostname"}
    if unknown := sorted(set(options) - known):
        raise ConfigError(
            f"source {location.url}: its storage_options were refused: no option {unknown[0]!r}; "
            "those of paramiko's SSHClient.connect are meant"
        )
    host, address = _address(url, location.url)
    waits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), stalled)
    settings = {**waits, **address, **options}
    return SshServer(host, location.root, settings, policy == "reject", stalled)


def _address(url: str, shown: str) -> tuple[str, dict[str, Any]]:
    """Return the host, and what else stands before the path, by paramiko's names."""
    try:
        parsed = urlsplit(url)
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host = port = None
    if not host:
        raise ConfigError(f"source.url {shown}: expected sftp://HOST/PATH")
    found = {
        "port": port,
        "username": parsed.username and unquote(parsed.username),
        "password": parsed.password and unquote(parsed.password),
    }
    return host, {name: value for name, value in found.items() if value is not None}


def _answers(transport: Any, error: Exception) -> bool:
    """Whether the server is still there, so that the failure is what it wants."""
    return (
        transport is not None and transport.is_active() and "timeout" not in str(error).lower()
    )


def words(error: BaseException) -> str:
    """Return what an error says, in one line."""
    said = getattr(error, "strerror", None) or str(error)
    return short(" ".join(str(said).split())) or type(error).__name__
