"""TLS fails: the service reports why, caches nothing, and neither crashes nor hangs."""

from __future__ import annotations

import contextlib
import io
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.accidents import commands
from tests.servers.web import web

trustme = pytest.importorskip("trustme")


def served(certificate: object) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)  # type: ignore[attr-defined]
    return context


@contextlib.contextmanager
def raw(answer: bytes) -> Iterator[str]:
    """A server that answers each connection with fixed bytes and closes it."""
    server = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(answer)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


@contextlib.contextmanager
def self_signed(folder: Path) -> Iterator[tuple[str, str]]:
    own, other = trustme.CA(), trustme.CA()
    other.cert_pem.write_to_path(str(folder / "ca.pem"))
    with web(folder, tls=served(own.issue_cert("127.0.0.1"))) as address:
        yield address, "certificate is not trusted"


@contextlib.contextmanager
def expired(folder: Path) -> Iterator[tuple[str, str]]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    ended = datetime.now(UTC) - timedelta(days=1)
    with web(folder, tls=served(authority.issue_cert("127.0.0.1", not_after=ended))) as address:
        yield address, "certificate is not trusted"


@contextlib.contextmanager
def wrong_host(folder: Path) -> Iterator[tuple[str, str]]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    with web(folder, tls=served(authority.issue_cert("lab.example"))) as address:
        yield address, "certificate is not trusted"


@contextlib.contextmanager
def cut_off(folder: Path) -> Iterator[tuple[str, str]]:
    trustme.CA().cert_pem.write_to_path(str(folder / "ca.pem"))
    with raw(b"\x16\x03\x03\x00") as address:
        yield address, "waits for the store"


@contextlib.contextmanager
def plain_port(folder: Path) -> Iterator[tuple[str, str]]:
    trustme.CA().cert_pem.write_to_path(str(folder / "ca.pem"))
    with raw(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as address:
        yield address, "waits for the store"


Fault = Callable[[Path], contextlib.AbstractContextManager[tuple[str, str]]]
FAULTS: list[Fault] = [self_signed, expired, wrong_host, cut_off, plain_port]


@pytest.mark.parametrize(
    "pattern",
    ["x.npy", pytest.param("*.npy", marks=pytest.mark.slow)],
    ids=["obstore", "fsspec"],
)
@pytest.mark.parametrize(
    "fault",
    [
        wrong_host,
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in FAULTS
            if fault != wrong_host
        ),
    ],
)
def test_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, pattern: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    file = io.BytesIO()
    np.save(file, np.zeros(8))
    (folder / "x.npy").write_bytes(file.getvalue())
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    with fault(folder) as (address, words):
        config = commands.write_config(
            tmp_path / "cache.yaml",
            {"url": f"{address}/{pattern}", "format": "npy"},
            sampling={"timeout_seconds": 2},
        )
        with commands.running(config) as service:
            commands.wait_until(lambda: words in service.errors)
            if service.alive:
                service.process.send_signal(signal.SIGINT)
            assert service.process.wait(300) in (0, 1, 2)
            said = service.errors
    assert "Traceback" not in said
    assert address.removeprefix("https://") in said
    assert commands.status(tmp_path / "cache").get("samples", 0) == 0
