"""Files of SSH servers: host keys, refusals, and connections that break and are made again."""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from growcache.config import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    CredentialsError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.store.contract import PAGE_ENTRIES, Entry, Page
from growcache.store.listing import walk_folders
from growcache.store.retries import stalled_seconds
from growcache.store.urls import Location
from growcache.usercode import short_key

if TYPE_CHECKING:
    from typing_extensions import Buffer


# As OpenSSH's client has them; the first that knows a host is believed.
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")
_HOST_KEY_POLICIES = ("auto_add", "reject")  # fsspec's names


@dataclass(frozen=True)
class SshServer:
    """A host, and what else paramiko's ``connect`` is told."""

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

    def connect(self) -> SftpConnection:
        """Return a new connection.

        Raises:
            CredentialsError: the server lets nobody in with these credentials, a key's file cannot
            be read, or the server is another one.
            ConfigError: an option of the wrong kind.
            TransientStoreError: no answer, or one that broke off.
        """
        from paramiko import SSHClient

        client = SSHClient()
        client.set_missing_host_key_policy(_HostKeyPolicy(self))
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
        return SftpConnection(client, sftp)

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
        if isinstance(error, SSHException) and _is_connected(transport, error):
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
        return f"no connection ({error_text(error)})"

    def _refusal(self, error: Exception, *, is_in: bool) -> CredentialsError:
        from paramiko.ssh_exception import PasswordRequiredException

        if is_in:
            return CredentialsError(
                f"{self.url} lets this user in, and offers no SFTP ({error_text(error)})"
            )
        # Of several keys the last failure is told, be it only that a file holds another kind.
        if isinstance(error, PasswordRequiredException):
            return CredentialsError(
                f"{self.url}: the private key is encrypted; set passphrase in "
                "source.storage_options, or use an agent"
            )
        return CredentialsError(
            f"{self.url} refuses the user or the key ({error_text(error)}); check username, "
            "key_filename, passphrase and password in source.storage_options, or the keys in "
            "~/.ssh and the agent"
        )

    @property
    def known_as(self) -> str:
        """Its name in known_hosts."""
        port = self.settings.get("port", 22)
        return self.host if port == 22 else f"[{self.host}]:{port}"


@dataclass(frozen=True)
class SftpConnection:
    """An open one; who keeps ``sftp`` alone loses it, for it ends with its client."""

    client: Any
    sftp: Any

    def close(self) -> None:
        """End it."""
        self.client.close()


class _HostKeyPolicy:
    """What paramiko asks of a host that no known_hosts has; it refuses changed keys itself."""

    def __init__(self, server: SshServer) -> None:
        self._server = server

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        if self._server.is_strict:
            raise CredentialsError(
                f"{self._server.url} is not in ~/.ssh/known_hosts, and host_key_policy is "
                "reject; connect once by ssh"
            )


def ssh_server(
    url: str, location: Location, options: Mapping[str, Any], stalled: float
) -> SshServer:
    """Return the server of a URL.

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
    if policy not in _HOST_KEY_POLICIES:
        raise ConfigError(
            f"source.storage_options: expected a host_key_policy of {' or '.join(_HOST_KEY_POLICIES)}"
        )
    known = set(inspect.signature(SSHClient.connect).parameters) - {"self", "hostname"}
    if unknown := sorted(set(options) - known):
        raise ConfigError(
            f"source {location.url}: its storage_options were refused: no option {unknown[0]!r}; "
            "those of paramiko's SSHClient.connect are meant"
        )
    host, address = _parse_ssh_address(url, location.url)
    waits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), stalled)
    settings = {**waits, **address, **options}
    return SshServer(host, location.root, settings, policy == "reject", stalled)


def _parse_ssh_address(url: str, shown: str) -> tuple[str, dict[str, Any]]:
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


def _is_connected(transport: Any, error: Exception) -> bool:
    """Whether the server is still there, so that the failure is what it wants."""
    return (
        transport is not None and transport.is_active() and "timeout" not in str(error).lower()
    )


def error_text(error: BaseException) -> str:
    """Return what an error says, in one line."""
    said = getattr(error, "strerror", None) or str(error)
    return short_key(" ".join(str(said).split())) or type(error).__name__


T = TypeVar("T")

_MOST_CONNECTIONS = 8  # connections that are kept
_REQUEST_BYTES = 1 << 15  # what every server answers at once; many are asked for together
_IN_FLIGHT_BYTES = 1 << 25  # whose requests fit into any window, so that asking never waits


class SftpBackend:
    """One user on one host; keys are absolute paths there.

    A connection is lent to one request at a time, and made where none is idle. One on which
    anything failed is given up, for nobody knows what of it is still on its way.
    """

    sorted = False  # by folder

    def __init__(self, server: SshServer, most: int) -> None:
        self._server = server
        self.identity = server.identity
        self._idle: list[SftpConnection] = []
        weakref.finalize(self, _close_all, self._idle)  # paramiko itself would keep them
        self._threads = ThreadPoolExecutor(min(_MOST_CONNECTIONS, most), "growcache-sftp")

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        top = location.prefix.rstrip("/") or "/"
        page = Page()
        for info in self._lines(
            walk_folders(_FolderLister(self), top, location.depth, after), top
        ):
            page.append(_entry_of_stat(info["name"], info))
            if len(page) == PAGE_ENTRIES:
                yield page
                page = Page()
        yield page

    def _lines(
        self, found: Iterator[Mapping[str, Any]], top: str
    ) -> Iterator[Mapping[str, Any]]:
        try:
            yield from found
        except Exception as error:
            if (translated := self._translated(error, top)) is None:
                raise
            if isinstance(translated, ObjectMissingError):
                translated.exit_code = 2  # the folder of the URL itself
            raise translated from None

    def head(self, key: str) -> Entry:
        info = self._asked(lambda sftp: _info_of_stat(key, sftp.stat(key)), key)
        if info["type"] != "file":
            raise ObjectMissingError(
                f"{self._where(key)} is not a file; to take all files below a folder, end "
                "source.url with /"
            )
        return _entry_of_stat(key, info)

    async def get(self, entry: Entry, start: int, stop: int) -> Buffer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads,
            lambda: self._asked(lambda sftp: _read_range(sftp, entry, start, stop), entry.key),
        )

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        _close_all(self._idle)

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """Lend a connection.

        Raises:
            StoreError: there can be none; see `SshServer.connect`.
            ConfigError: for what `SshServer.connect` says.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._server.connect()
        is_sound = False
        try:
            yield connection.sftp
            is_sound = True
        except (FileNotFoundError, PermissionError, StoreError):  # answers, as good as others
            is_sound = True
            raise
        finally:
            if is_sound and len(self._idle) < _MOST_CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()
            if not is_sound:
                _close_all(self._idle)  # the same may have befallen them

    def _asked(self, ask: Callable[[Any], T], key: str) -> T:
        try:
            with self.lent() as sftp:
                return ask(sftp)
        except Exception as error:
            if (translated := self._translated(error, key)) is None:
                raise
            raise translated from None

    def _translated(self, error: Exception, key: str) -> Exception | None:
        """Return growcache's error; None where it is a bug."""
        if isinstance(error, StoreError | ConfigError):
            return error
        if isinstance(error, FileNotFoundError):
            return ObjectMissingError(f"{self._where(key)} does not exist")
        if isinstance(error, PermissionError):
            return AccessError(f"{self._where(key)} may not be read by this user")
        # What is neither the system's nor of the language itself is paramiko's own.
        if isinstance(error, OSError | EOFError) or type(error).__module__ != "builtins":
            return TransientStoreError(f"{self._where(key)}: no answer ({error_text(error)})")
        return None

    def _where(self, key: str) -> str:
        return f"{self._server.url}{key}"


class _FolderLister:
    """Folders as `walk` wants them, with links as what they point to."""

    def __init__(self, backend: SftpBackend) -> None:
        self._backend = backend

    def ls(self, folder: str, detail: bool) -> list[Mapping[str, Any]]:
        base = folder.rstrip("/")
        with self._backend.lent() as sftp:
            # All of them first: the answers to other requests are in between otherwise.
            listed = [
                _info_of_stat(f"{base}/{one.filename}", one)
                for one in sftp.listdir_iter(folder)
            ]
            found = [_follow_link(sftp, info) for info in listed]
        return [info for info in found if info["type"] in ("file", "directory")]


def _close_all(idle: list[SftpConnection]) -> None:
    while idle:
        idle.pop().close()


def _info_of_stat(name: str, found: Any) -> dict[str, Any]:
    """Return an entry as fsspec's file systems have them."""
    mode = found.st_mode
    kind = "file" if mode is None or S_ISREG(mode) else "other"
    if mode is not None and (S_ISDIR(mode) or S_ISLNK(mode)):
        kind = "directory" if S_ISDIR(mode) else "link"
    return {"name": name, "type": kind, "size": found.st_size, "mtime": found.st_mtime}


def _follow_link(sftp: Any, info: dict[str, Any]) -> dict[str, Any]:
    """Return what a link points to; itself where nothing is there, or a folder it lies in."""
    name = info["name"]
    if info["type"] != "link":
        return info
    try:
        found = _info_of_stat(name, sftp.stat(name))
    except (FileNotFoundError, PermissionError):
        return info
    if found["type"] != "directory":
        return found
    real = sftp.normalize(name)
    above = any(sftp.normalize(str(folder)) == real for folder in PurePosixPath(name).parents)
    return info if above else found


def _entry_of_stat(key: str, info: Mapping[str, Any]) -> Entry:
    if info["size"] is None:
        raise StoreError(f"{key}: the server does not tell its size, so it cannot be divided")
    mtime = info["mtime"]
    return Entry(key, int(info["size"]), None, None if mtime is None else float(mtime))


def _read_range(sftp: Any, entry: Entry, start: int, stop: int) -> bytes:
    with sftp.open(entry.key, "rb") as file:
        data = b"".join(_read_pieces(file, start, stop))
        # After the read: what was written before or during it shows now.
        found = _entry_of_stat(entry.key, _info_of_stat(entry.key, file.stat()))
    if (found.size, found.mtime) != (entry.size, entry.mtime):
        raise ObjectChangedError(
            f"{entry.key} was rewritten since it was listed: expected {entry.size} bytes of "
            f"time {entry.mtime}, found {found.size} of {found.mtime}"
        )
    return data


def _read_pieces(file: Any, start: int, stop: int) -> Iterator[bytes]:
    for first in range(start, stop, _IN_FLIGHT_BYTES):
        last = min(first + _IN_FLIGHT_BYTES, stop)
        wanted = [
            (at, min(_REQUEST_BYTES, last - at)) for at in range(first, last, _REQUEST_BYTES)
        ]
        yield from file.readv(wanted)


def open_sftp(
    location: Location, url: str, source: SourceConfig, concurrency: int, timeout_seconds: float
) -> SftpBackend:
    """Return the backend of a URL's host.

    Raises:
        ConfigError: paramiko is missing, the URL names no host, or an option is unknown.
    """
    stalled = stalled_seconds(timeout_seconds)
    server = ssh_server(url, location, source.storage_options, stalled)
    return SftpBackend(server, concurrency)
