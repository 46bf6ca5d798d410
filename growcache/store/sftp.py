"""Files on SSH servers.

All reads share a few connections, because asyncssh has any number of requests in flight on
each. The connections belong to one event loop, in a separate thread. Files stay open for a
while after a read, so that another part of the same object costs one round trip instead of two.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, Any, TypeVar

import asyncssh
import uvloop
from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs

from growcache.config_source import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    CredentialsError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.store.contract import Entry, Page, paginate
from growcache.store.credentials import SshServer, refused_ssh_options, ssh_server
from growcache.store.listing import walk_folders
from growcache.store.response_check import check_same_version
from growcache.store.retries import stalled_seconds
from growcache.store.urls import Location
from growcache.usercode import short_key

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

# As in OpenSSH's client.
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")
_REFUSALS = (
    asyncssh.PermissionDenied,
    asyncssh.KeyImportError,
    asyncssh.KeyEncryptionError,
    asyncssh.IllegalUserName,
)

_MOST_CONNECTIONS = 4
_REFUSED_SECONDS = 60.0  # until a server that refused a further connection is asked again
_READS_PER_CONNECTION = 4  # more reads open another connection
_OPEN_FILES = 32  # per connection
_REQUEST_BYTES = 1 << 17
_IN_FLIGHT_BYTES = 1 << 25  # of one read


async def _connect(server: SshServer) -> _Connection:
    check = ssh = None
    try:
        settings = dict(server.settings)
        if server.uses_agent_only:
            settings["client_keys"] = await _agent_keys() or None
        options = asyncssh.SSHClientConnectionOptions(host=server.host, **settings)
        check = _HostKeyCheck(options, rejects_unknown=server.rejects_unknown_hosts)
        ssh, _ = await asyncssh.create_connection(
            check.client,
            server.host,
            known_hosts=check.known,
            server_host_key_algs=check.algorithms,
            # From those that ~/.ssh/config allows. AES-GCM takes the least time in Python.
            encryption_algs=sorted(
                map(bytes.decode, options.encryption_algs),
                key=lambda name: "gcm" not in name,
            ),
            **settings,
        )
        async with asyncio.timeout(server.stall_seconds):
            sftp = await ssh.start_sftp_client(path_errors="surrogateescape")
        return _Connection(ssh, sftp, server.stall_seconds)
    except BaseException as error:
        if ssh is not None:
            ssh.close()
        if not isinstance(error, Exception):
            raise
        raise _connect_error(server, error, check, is_logged_in=ssh is not None) from None


def _connect_error(
    server: SshServer, error: Exception, check: _HostKeyCheck | None, *, is_logged_in: bool
) -> Exception:
    text = error_text(error)
    if is_logged_in:
        lost = (asyncssh.ConnectionLost, asyncssh.SFTPConnectionLost, OSError)
        if isinstance(error, lost):
            return TransientStoreError(f"{server.url}: no connection ({text})")
        return CredentialsError(f"{server.url} lets this user in, and offers no SFTP ({text})")
    if isinstance(error, asyncssh.HostKeyNotVerifiable) and check is not None:
        return CredentialsError(f"{server.url} {check.refusal}")
    if isinstance(error, asyncssh.KeyImportError) and "Passphrase must" in text:
        return CredentialsError(
            f"{server.url}: the private key is encrypted; set passphrase in "
            "source.storage_options, or use an agent"
        )
    if isinstance(error, _REFUSALS):
        return CredentialsError(
            f"{server.url} refuses the user or the key ({text}); check username, key_filename, "
            "passphrase and password in source.storage_options, or the keys in ~/.ssh and the "
            "agent"
        )
    if isinstance(error, FileNotFoundError | PermissionError) and error.filename:
        return CredentialsError(
            f"{server.url}: {error.filename} of source.storage_options cannot be read "
            f"({error.strerror})"
        )
    if isinstance(error, asyncssh.ConfigParseError):
        return ConfigError(
            f"source {server.url}: ~/.ssh/config cannot be read ({text})", code="GC215"
        )
    if isinstance(error, TypeError | ValueError | AttributeError):
        return refused_ssh_options(server.url, error)
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in text:
        port = server.settings.get("port", 22)
        text = f"connection refused by {server.host}:{port} (source.url)"
        return TransientStoreError(f"{server.url}: {text}")
    if is_ssh_error(error):
        return TransientStoreError(f"{server.url}: no connection ({text})")
    return error


async def _agent_keys() -> list[Any]:
    try:
        return list(await (await asyncssh.connect_agent()).get_keys())
    except OSError:
        return []


class _HostKeyCheck:
    """Compares a host's key with known_hosts.

    A host with an entry there must show one of its keys or authorities. A host without one is
    accepted unless ``rejects_unknown`` is set.
    """

    def __init__(self, options: Any, *, rejects_unknown: bool) -> None:
        host, port = options.host_key_alias or options.host, options.port
        name = host if port == 22 else f"[{host}]:{port}"
        self.known = _known_hosts().match(name, "", None)
        keys, authorities = self.known[:2]
        algorithms = [get_default_certificate_algs()] if authorities else []
        algorithms += [key.sig_algorithms for key in keys]
        every = dict.fromkeys([*chain(*algorithms), *get_default_public_key_algs()])
        self.algorithms = [bytes(name).decode() for name in every]  # known ones first
        self.refusal = (
            f"shows another key than known_hosts has for it; if that is meant, run: ssh-keygen -R "
            f"{name}, and connect once by ssh"
            if keys or authorities
            else "is not in ~/.ssh/known_hosts, and host_key_policy is reject; connect once by ssh"
        )
        self._accepts_others = not (keys or authorities or rejects_unknown)

    def client(self) -> Any:
        answer = {"validate_host_public_key": lambda *_: self._accepts_others}
        return type("Client", (asyncssh.SSHClient,), answer)()


def _known_hosts() -> Any:
    known = asyncssh.SSHKnownHosts()
    for path in (Path(name).expanduser() for name in _KNOWN_HOSTS):
        if path.is_file():
            for line in path.read_text(errors="replace").splitlines():
                with suppress(ValueError):  # OpenSSH also skips a damaged line
                    known.load(line)
    return known


def open_sftp(
    location: Location, url: str, source: SourceConfig, concurrency: int, timeout_seconds: float
) -> SftpBackend:
    asyncssh.set_log_level(logging.CRITICAL)
    stalled = stalled_seconds(timeout_seconds)
    return SftpBackend(ssh_server(location, url, source.storage_options, stalled), concurrency)


def is_ssh_error(error: BaseException) -> bool:
    return isinstance(error, OSError | EOFError) or type(error).__module__ != "builtins"


def error_text(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return short_key(" ".join(str(text).split())) or type(error).__name__


@dataclass(eq=False)
class _OpenFile:
    opening: asyncio.Task[Any]
    readers: int = 0
    is_dropped: bool = False

    def close_if_unused(self) -> None:
        if self.is_dropped and not self.readers:
            self.opening.add_done_callback(_close_file)


def _close_file(opening: asyncio.Task[Any]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        asyncio.ensure_future(opening.result().close()).add_done_callback(_ignore_result)


def _ignore_result(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


class _Connection:
    def __init__(self, ssh: Any, sftp: Any, stall_seconds: float) -> None:
        self.sftp = sftp
        self.requests = 0
        self.ssh = ssh
        self._stall_seconds = stall_seconds
        self._answered_at = time.monotonic()
        self._files: OrderedDict[tuple[Any, ...], _OpenFile] = OrderedDict()
        self._request_bytes = min(_REQUEST_BYTES, sftp.limits.max_read_len or _REQUEST_BYTES)

    async def until_stalled(self, work: Coroutine[Any, Any, T]) -> T:
        began = time.monotonic()
        task = asyncio.ensure_future(work)
        try:
            while True:
                left = max(began, self._answered_at) + self._stall_seconds - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"nothing came for {self._stall_seconds:g} s")
                done, _ = await asyncio.wait({task}, timeout=left)
                if done:
                    return task.result()
        finally:
            task.cancel()

    async def answer(self, request: Awaitable[T]) -> T:
        """Return the answer to one request. Any answer proves that the connection is alive."""
        try:
            return await request
        finally:
            self._answered_at = time.monotonic()

    async def read(self, entry: Entry, start: int, stop: int) -> bytes:
        """Return a range of the listed version.

        Servers process the requests for one open file in order. The size and time that are
        requested last are therefore those after the reads.
        """
        size = self._request_bytes
        parts: list[bytes] = []
        async with self._opened(entry) as file:
            for first in range(start, stop, _IN_FLIGHT_BYTES):
                last = min(stop, first + _IN_FLIGHT_BYTES)
                spans = [(at, min(at + size, last)) for at in range(first, last, size)]
                *found, stat = await asyncio.gather(
                    *(self.answer(file.read(end - at, at)) for at, end in spans),
                    self.answer(file.stat()),
                )
                for (at, end), data in zip(spans, found, strict=True):
                    # Servers may send less than the requested bytes.
                    while at + len(data) < end:
                        place = at + len(data)
                        more = await self.answer(file.read(end - place, place))
                        stat = await self.answer(file.stat())
                        if not more:
                            break
                        data += more
                    parts.append(data)
            check_same_version(entry, _entry_of_info(_info_of_stat(entry.key, stat)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @asynccontextmanager
    async def _opened(self, entry: Entry) -> AsyncIterator[Any]:
        """Lend the open file of a version. After a failure the file is opened again."""
        version = (entry.key, entry.size, entry.mtime)
        if (file := self._files.get(version)) is None:
            opening = self.answer(self.sftp.open(entry.key, "rb", block_size=0))
            file = self._files[version] = _OpenFile(asyncio.ensure_future(opening))
        self._files.move_to_end(version)
        file.readers += 1
        try:
            yield await asyncio.shield(file.opening)
        except BaseException:
            if self._files.get(version) is file:
                del self._files[version]
            file.is_dropped = True
            raise
        finally:
            file.readers -= 1
            file.close_if_unused()
            while len(self._files) > _OPEN_FILES:
                oldest = self._files.popitem(last=False)[1]
                oldest.is_dropped = True
                oldest.close_if_unused()

    async def list_folder(self, folder: str) -> list[Mapping[str, Any]]:
        base = folder.rstrip("/")
        infos = []
        async for one in self.sftp.scandir(folder):  # a few hundred names per answer
            self._answered_at = time.monotonic()
            if one.filename not in (".", ".."):
                infos.append(_info_of_stat(f"{base}/{one.filename}", one.attrs))
        infos = await asyncio.gather(*(self._follow_link(info) for info in infos))
        return [info for info in infos if info["type"] in ("file", "directory")]

    async def _follow_link(self, info: dict[str, Any]) -> dict[str, Any]:
        """Return the target of a link, or the link if the target is missing or contains the link."""
        name = info["name"]
        if info["type"] != "link":
            return info
        try:
            found = _info_of_stat(name, await self.answer(self.sftp.stat(name)))
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPPermissionDenied):
            return info
        if found["type"] != "directory":
            return found
        paths = [name, *map(str, PurePosixPath(name).parents)]
        real, *above = await asyncio.gather(
            *(self.answer(self.sftp.realpath(path)) for path in paths)
        )
        return info if real in above else found


class _ConnectionPool:
    """The connections to one server.

    All methods run in its loop, except `start`, `call`, `ls` and `close`.
    """

    def __init__(self, server: SshServer, most: int) -> None:
        self._server = server
        self._most = min(_MOST_CONNECTIONS, most)
        self._refused_at = -math.inf  # time of the last refused further connection, monotonic
        self._connections: list[_Connection] = []
        self._opening: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def start(self, work: Callable[[_Connection], Coroutine[Any, Any, T]]) -> Any:
        with self._lock:
            if self._is_closed:
                raise RuntimeError(_CLOSED)
            if self._loop is None:
                self._loop = uvloop.new_event_loop()
                threading.Thread(
                    target=_run_loop, args=[self._loop], name="growcache-sftp", daemon=True
                ).start()
            return asyncio.run_coroutine_threadsafe(self._run(work), self._loop)

    def call(self, work: Callable[[_Connection], Coroutine[Any, Any, T]]) -> T:
        found: T = self.start(work).result()
        return found

    def ls(self, folder: str, detail: bool) -> list[Mapping[str, Any]]:
        return self.call(lambda one: one.list_folder(folder))

    def close(self) -> None:
        with self._lock:
            loop, self._loop, self._is_closed = self._loop, None, True
            if loop is not None:
                asyncio.run_coroutine_threadsafe(self._end(loop), loop)

    async def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(Exception):
            async with asyncio.timeout(1):
                tasks = asyncio.all_tasks() - {asyncio.current_task()}
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for connection in self._connections:
                    connection.ssh.close()
                for connection in self._connections:
                    await connection.ssh.wait_closed()
        loop.stop()

    async def _run(self, work: Callable[[_Connection], Coroutine[Any, Any, T]]) -> T:
        try:
            connection = await self._least_busy()
            connection.requests += 1
            try:
                return await connection.until_stalled(work(connection))
            finally:
                connection.requests -= 1
        except (asyncssh.SFTPNoSuchFile, asyncssh.SFTPNoSuchPath) as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from None
        except asyncssh.SFTPPermissionDenied as error:
            raise PermissionError(errno.EACCES, str(error)) from None
        except (
            asyncssh.SFTPFailure,
            StoreError,
        ):  # answers, which prove that the connection works
            raise
        except asyncio.CancelledError:
            if self._is_closed:
                raise RuntimeError(_CLOSED) from None
            raise
        except BaseException:
            for one in self._connections:  # the others may be broken, too
                one.ssh.close()
            self._connections = []
            raise

    async def _least_busy(self) -> _Connection:
        while True:
            found = min(self._connections, key=lambda one: one.requests, default=None)
            is_free = found is not None and found.requests < _READS_PER_CONNECTION
            if not is_free and self._opening is None and self._may_open():
                self._opening = asyncio.ensure_future(self._open())
                self._opening.add_done_callback(_ignore_result)
            if found is not None:
                return found
            assert self._opening is not None
            await asyncio.shield(self._opening)

    def _may_open(self) -> bool:
        refused_recently = time.monotonic() - self._refused_at < _REFUSED_SECONDS
        return not self._connections or (
            len(self._connections) < self._most and not refused_recently
        )

    async def _open(self) -> None:
        try:
            self._connections.append(await _connect(self._server))
        except BaseException:
            # With none left, the server is away, and will allow as many as before.
            if self._connections:
                self._refused_at = time.monotonic()
            raise
        finally:
            self._opening = None


_CLOSED = "the store was closed"


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


class SftpBackend:
    sorted = False  # by folder

    def __init__(self, server: SshServer, most: int) -> None:
        self._server = server
        self.identity = server.identity
        self._pool = _ConnectionPool(server, most)
        self._close = weakref.finalize(self, self._pool.close)

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        top = location.prefix.rstrip("/") or "/"
        try:
            with self._translated_errors(top):
                for page in paginate(walk_folders(self._pool, top, location.depth, after)):
                    yield Page(map(_entry_of_info, page))
        except ObjectMissingError as error:
            error.exit_code = 2  # the URL's own folder
            raise

    def head(self, key: str) -> Entry:
        with self._translated_errors(key):
            found = self._pool.call(lambda one: one.answer(one.sftp.stat(key)))
        info = _info_of_stat(key, found)
        if info["type"] != "file":
            raise ObjectMissingError(
                f"{self._server.url}{key} is not a file; to take all files below a folder, end "
                "source.url with /"
            )
        return _entry_of_info(info)

    async def get(self, entry: Entry, start: int, stop: int) -> Buffer:
        with self._translated_errors(entry.key):
            reading = self._pool.start(lambda one: one.read(entry, start, stop))
            data: bytes = await asyncio.wrap_future(reading)
        return data

    async def close(self) -> None:
        self._close()

    @contextmanager
    def _translated_errors(self, key: str) -> Iterator[None]:
        where = f"{self._server.url}{key}"
        try:
            yield
        except (StoreError, ConfigError):
            raise
        except FileNotFoundError:
            raise ObjectMissingError(f"{where} does not exist") from None
        except PermissionError:
            raise AccessError(f"{where} may not be read by this user") from None
        except Exception as error:
            if not is_ssh_error(error):  # a bug
                raise
            text = f"{where}: no answer ({error_text(error)})"
            raise TransientStoreError(text) from None


def _info_of_stat(name: str, found: Any) -> dict[str, Any]:
    mode = found.permissions
    kind = "file" if mode is None or S_ISREG(mode) else "other"
    if mode is not None and (S_ISDIR(mode) or S_ISLNK(mode)):
        kind = "directory" if S_ISDIR(mode) else "link"
    return {"name": name, "type": kind, "size": found.size, "mtime": found.mtime}


def _entry_of_info(info: Mapping[str, Any]) -> Entry:
    key, mtime = info["name"], info["mtime"]
    if info["size"] is None:
        raise StoreError(f"{key}: the server does not report its size, so it cannot be divided")
    return Entry(key, int(info["size"]), None, None if mtime is None else float(mtime))
