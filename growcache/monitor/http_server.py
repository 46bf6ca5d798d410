"""The server of the dashboard: addresses, sockets, the token, uvicorn."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from growcache.errors import ConfigError
from growcache.monitor.server import clean_prefix, create_app

DEFAULT_ADDRESS = "127.0.0.1:8650"
TOKEN_VARIABLE = "GROWCACHE_TOKEN"
PUBLIC_METRICS_VARIABLE = "GROWCACHE_PUBLIC_METRICS"
LEAST_TOKEN_CHARACTERS = 16
END_SECONDS = 2  # for responses in progress


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int  # 0: any free one

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return HOST:PORT. A port alone is on the loopback. May raise ConfigError.

        >>> Address.parse("8650"), Address.parse("[::1]:0")
        (Address(host='127.0.0.1', port=8650), Address(host='::1', port=0))
        """
        host, colon, port = text.rpartition(":")
        if not colon:
            host = "127.0.0.1"
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(
                f"--http expects HOST:PORT, such as {DEFAULT_ADDRESS}, found {text!r}",
                code="GC802",
            )
        return cls(host, int(port))


def read_token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the token of the file, or else of GROWCACHE_TOKEN, or else None."""
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--token-file {file} cannot be read: {error}", code="GC802"
            ) from None
        where = f"the token in {file}"
    else:
        token, where = environment.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not token:
            return None
    if len(token) < LEAST_TOKEN_CHARACTERS:
        raise ConfigError(
            f"{where} must have at least {LEAST_TOKEN_CHARACTERS} characters; make one with: "
            "openssl rand -hex 16",
            code="GC802",
        )
    # Clients send other characters in different ways.
    if not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{where} must be plain ASCII; make one with: openssl rand -hex 16", code="GC802"
        )
    return token


def are_metrics_public(environment: Mapping[str, str]) -> bool:
    """Whether the metrics need no token, as when Prometheus finds pods by their annotations."""
    value = environment.get(PUBLIC_METRICS_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(
            f"{PUBLIC_METRICS_VARIABLE} must be 0 or 1, found {value[:40]!r}", code="GC802"
        )
    return value == "1"


def listen(address: Address, token: str | None) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The address is in use, or reachable by others without a token.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--http: {address.host} is not an address of this machine: {error}", code="GC802"
        ) from None
    family, _, _, _, at = found[0]
    if token is None and not ipaddress.ip_address(str(at[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"--http {address.host}: others can reach that address, so a token is needed: set "
            f"{TOKEN_VARIABLE} or --token-file, or listen on 127.0.0.1 and use ssh -L",
            code="GC802",
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(at)
        listening.listen(64)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port} ({error.strerror}); choose another "
            "address with --http HOST:PORT",
            code="GC802",
        ) from None
    return listening


def url_of(listening: socket.socket, prefix: str) -> str:
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # not an address that a browser could open
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{clean_prefix(prefix)}/"


class _Server(uvicorn.Server):
    """A server that ends streams of events first, because they never end by themselves."""

    def __init__(self, config: uvicorn.Config, end_events: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_events = end_events

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_events()
        await super().shutdown(sockets)


def serve_dashboard(
    caches: Sequence[Path],
    listening: socket.socket,
    *,
    token: str | None,
    prefix: str,
    ends_with_input: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM, or until the standard input ends."""
    public = are_metrics_public(os.environ)
    app = create_app(caches, token=token, prefix=prefix, public_metrics=public)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # it would contain tokens
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=END_SECONDS,
    )
    server = _Server(config, app.state.end_events)
    if ends_with_input:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after a clean end
        server.run(sockets=[listening])


def _end_with_input(server: uvicorn.Server) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.should_exit = True
