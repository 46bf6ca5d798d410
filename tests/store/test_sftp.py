"""Files of an OpenSSH server: links, connections that break, and logins."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from growcache.config_source import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    GrowcacheError,
    ObjectChangedError,
    ObjectMissingError,
    TransientStoreError,
)
from growcache.store.contract import Entry
from growcache.store.opening import open_store
from growcache.store.store import RemoteStore
from tests.servers import free_port, wait_until
from tests.servers.sftp import Relay, Ssh, relay
from tests.store.places import listed, only, read


@pytest.fixture
def link(ssh_server: Ssh) -> Iterator[Relay]:
    with relay(ssh_server.port) as made:
        yield made


def opened(url: str | list[str], options: dict[str, Any], **settings: Any) -> RemoteStore:
    source = SourceConfig.model_validate({"url": url, "storage_options": options})
    return open_store(source, **{"timeout_seconds": 5, **settings})


def test_links_are_what_they_point_to(ssh_server: Ssh, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x?#.npy").write_bytes(b"12345")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "l").symlink_to(tmp_path / "a" / "x?#.npy")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    os.mkfifo(tmp_path / "pipe")
    store = opened(ssh_server.url(f"{tmp_path}/"), ssh_server.options)
    found = {entry.key.removeprefix(f"{tmp_path}/"): entry.size for entry in listed(store)}
    assert found == {"a/x?#.npy": 5, "b/x?#.npy": 5, "l": 5}


@pytest.mark.slow
def test_a_connection_that_breaks_in_the_middle(
    ssh_server: Ssh, link: Relay, tmp_path: Path
) -> None:
    data = os.urandom(40_000_000)  # more than is requested at once
    (tmp_path / "x").write_bytes(data)
    failures: list[BaseException] = []
    url = ssh_server.url(f"{tmp_path}/x", link.port)
    store = opened(url, ssh_server.options, on_retry=failures.append)
    entry = only(store)
    link.cut_after = 1_000_000

    async def twice() -> None:
        assert await read(store, entry) == data
        link.cut_all()  # between two reads
        assert await read(store, entry, 7, 99) == data[7:99]
        await store.close()

    asyncio.run(twice())
    assert link.cuts == 1
    assert len(failures) >= 2
    assert all("no answer" in str(failure) for failure in failures)


def test_a_listing_goes_on_over_a_new_connection(
    ssh_server: Ssh, link: Relay, tmp_path: Path
) -> None:
    for folder in "abc":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_text(folder)
    failures: list[BaseException] = []
    url = ssh_server.url(f"{tmp_path}/**", link.port)
    link.cut_after = 4_500  # after the handshake
    store = opened(url, ssh_server.options, on_retry=failures.append)
    names = [entry.key.removeprefix(f"{tmp_path}/") for entry in listed(store)]
    assert names == ["a/x", "b/x", "c/x"]
    assert link.cuts == len(failures) == 1


@pytest.mark.slow
def test_a_large_folder_takes_longer_than_a_stall(
    ssh_server: Ssh, link: Relay, tmp_path: Path
) -> None:
    """A folder is listed in many answers, and each shows that the connection is alive."""
    for number in range(4_000):
        (tmp_path / f"{number:04}").write_bytes(b"1")
    failures: list[BaseException] = []
    store = opened(
        ssh_server.url(f"{tmp_path}/", link.port), ssh_server.options, on_retry=failures.append
    )
    link.pause_seconds = 0.02
    began = time.monotonic()
    assert len(listed(store)) == 4_000
    assert time.monotonic() - began > 5 / 4, "the listing must take longer than a stall"
    assert not failures


def test_a_server_that_was_away_is_given_all_connections_again(
    ssh_server: Ssh, link: Relay, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    store = opened(ssh_server.url(f"{tmp_path}/x", link.port), ssh_server.options)
    entry = only(store)

    async def away_and_back() -> None:
        link.refuses = True
        link.cut_all()
        reading = asyncio.ensure_future(read(store, entry))
        await asyncio.to_thread(wait_until, lambda: link.refused > 0, "a refused connection")
        link.refuses = False
        assert await reading == b"12345"
        link.pause_seconds = 0.01
        await asyncio.gather(*(read(store, entry) for _ in range(600)))
        assert link.connections > 1
        await store.close()

    asyncio.run(away_and_back())


STRANGERS = [
    ({"key_filename": "stranger"}, AccessError, "refuses the user or the key .*; check"),
    ({"key_filename": "other"}, AccessError, "refuses the user or the key"),
    ({"key_filename": "stranger.pub"}, AccessError, "refuses the user or the key"),
    ({"key_filename": "locked"}, AccessError, "the private key is encrypted; set passphrase"),
    ({"key_filename": "locked", "passphrase": "x"}, AccessError, "refuses the user or the key"),
    ({"key_filename": None}, AccessError, "refuses the user or the key"),
    ({"username": "nobody-here"}, AccessError, "refuses the user or the key"),
    (
        {"key_filename": "absent"},
        AccessError,
        "absent of source.storage_options cannot be read",
    ),
    (
        {"keyfilename": "x"},
        ConfigError,
        "storage_options were refused: no option 'keyfilename'",
    ),
    ({"key_filename": 7}, ConfigError, r"storage_options were refused \(TypeError\)"),
    ({"host_key_policy": "warning"}, ConfigError, "auto_add or reject"),
    ({"host_key_policy": "reject"}, AccessError, "is not in ~/.ssh/known_hosts"),
]


def test_the_config_of_ssh_is_read(
    ssh_server: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("1")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        f"Host lab\n  HostName 127.0.0.1\n  Port {ssh_server.port}\n"
        f"  User {ssh_server.options['username']}\n  IdentityFile {ssh_server.root / 'me'}\n"
    )
    assert only(opened(f"sftp://lab{tmp_path}/x", {"allow_agent": False})).size == 1
    with pytest.raises(TransientStoreError, match="connection refused"):
        listed(opened(f"sftp://lab:{free_port()}{tmp_path}/x", {}, timeout_seconds=0.5))


def test_an_encrypted_key_and_its_passphrase(ssh_server: Ssh, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1")
    key = tmp_path / "key"
    key.write_bytes((ssh_server.root / "me").read_bytes())
    key.chmod(0o600)
    command = ["ssh-keygen", "-q", "-p", "-a", "1", "-N", "secret", "-P", "", "-f", str(key)]
    subprocess.run(command, check=True)
    options = ssh_server.options | {"key_filename": [str(key)], "passphrase": "secret"}
    assert only(opened(ssh_server.url(f"{tmp_path}/x"), options)).size == 1


def test_a_file_that_stays_open_is_never_taken_for_its_successor(
    ssh_server: Ssh, tmp_path: Path
) -> None:
    def put(data: bytes, time: int, name: str = "x") -> None:
        (tmp_path / name).write_bytes(data)
        os.utime(tmp_path / name, (time, time))

    put(b"first", 1000)
    store = opened(ssh_server.url(f"{tmp_path}/x"), ssh_server.options)
    first = only(store)

    async def use() -> None:
        assert await read(store, first, 1, 3) == b"ir"
        put(b"other", 2000, "y")
        (tmp_path / "y").rename(tmp_path / "x")
        second = await store.find(first.key)
        assert await read(store, second) == b"other"
        assert (
            await read(store, first) == b"first"
        )  # still open, and the version that was listed
        put(b"again", 3000)
        with pytest.raises(ObjectChangedError):
            await read(store, second)
        assert await read(store, await store.find(first.key)) == b"again"
        await store.close()

    asyncio.run(use())


@pytest.fixture(scope="module")
def keys(ssh_server: Ssh) -> Path:
    """A folder with keys of all kinds."""
    for name, kind, phrase in [("other", "ecdsa", ""), ("locked", "ed25519", "secret")]:
        path = str(ssh_server.root / name)
        command = ["ssh-keygen", "-q", "-a", "1", "-t", kind, "-N", phrase, "-f", path]
        subprocess.run(command, check=True)
    return ssh_server.root


@pytest.mark.parametrize(("options", "kind", "words"), STRANGERS)
def test_who_is_not_let_in(
    ssh_server: Ssh,
    keys: Path,
    tmp_path: Path,
    options: dict[str, Any],
    kind: type[GrowcacheError],
    words: str,
) -> None:
    patterns = ("x", "*") if options is STRANGERS[0][0] else ("x",)
    if isinstance(name := options.get("key_filename"), str):
        options = options | {"key_filename": str(keys / name)}
    for pattern in patterns:
        with pytest.raises(kind, match=words) as caught:
            listed(
                opened(ssh_server.url(f"{tmp_path}/{pattern}"), ssh_server.options | options)
            )
        assert "\n" not in str(caught.value)
        started = "source" if kind is ConfigError else f"sftp://127.0.0.1:{ssh_server.port}"
        assert str(caught.value).startswith(started)


def test_a_host_whose_key_is_another_than_ssh_knows(
    ssh_server: Ssh, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("1")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    known = tmp_path / ".ssh" / "known_hosts"
    url, strict = ssh_server.url(f"{tmp_path}/x"), {"host_key_policy": "reject"}
    for name in ("host", "stranger", "other"):  # the last is of another kind
        key = (keys / f"{name}.pub").read_text()
        known.write_text(f"[127.0.0.1]:{ssh_server.port} {key}")
        for options in (ssh_server.options | strict, ssh_server.options):
            if name == "host":
                assert only(opened(url, options)).size == 1
                continue
            with pytest.raises(
                AccessError, match=r"another key than known_hosts.*ssh-keygen -R"
            ):
                listed(opened(url, options))


def test_nobody_there_and_nothing_there(ssh_server: Ssh, tmp_path: Path) -> None:
    options = ssh_server.options
    url = ssh_server.url(f"{tmp_path}/**", free_port())
    with pytest.raises(TransientStoreError, match=r"connection refused by .*given up after"):
        listed(opened(url, options, timeout_seconds=0.5))
    with pytest.raises(ObjectMissingError, match="nowhere does not exist") as caught:
        listed(opened(ssh_server.url(f"{tmp_path}/nowhere/*"), options))
    assert caught.value.exit_code == 2
    with pytest.raises(ObjectMissingError, match=r"end source\.url with /"):
        listed(opened(ssh_server.url(tmp_path), options))
    with pytest.raises(ConfigError, match="sftp://HOST/PATH"):
        opened("sftp:///x", options)


def test_addresses_of_one_host_share_connections(
    ssh_server: Ssh, link: Relay, tmp_path: Path
) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    url = ssh_server.url(f"{tmp_path}/", link.port)
    urls = [f"{url}a", f"{url}b", url.replace("127.0.0.1", "localhost") + "c"]
    store = opened(urls, ssh_server.options)
    assert len(listed(store)) == 3
    assert link.connections == 2
    asyncio.run(store.close())


def test_a_store_that_is_closed_ends_all_that_waits_for_a_connection(
    ssh_server: Ssh, link: Relay, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text("1")
    store = opened(
        ssh_server.url(f"{tmp_path}/x", link.port), ssh_server.options, timeout_seconds=120
    )
    entry = Entry(f"{tmp_path}/x", 1, None, 1.0)
    link.pause_seconds = 3  # so that no connection opens before the test ends
    ends: list[BaseException] = []

    def list_it() -> None:
        try:
            listed(store)
        except RuntimeError as error:
            ends.append(error)

    async def use() -> None:
        listing = threading.Thread(target=list_it, daemon=True)
        listing.start()
        reading = asyncio.ensure_future(store.read(entry))
        await asyncio.to_thread(wait_until, lambda: link.connections > 0, "a connection")
        await store.close()
        done, _ = await asyncio.wait({reading}, timeout=10)
        assert done
        with pytest.raises(RuntimeError, match="the store was closed"):
            reading.result()
        await asyncio.to_thread(listing.join, 10)
        assert "the store was closed" in str(ends)

    asyncio.run(use())


@pytest.mark.parametrize("closes", [True, False])
def test_no_connection_outlives_its_store(
    ssh_server: Ssh, link: Relay, tmp_path: Path, closes: bool
) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)

    async def use() -> None:
        store = opened(ssh_server.url(f"{tmp_path}/*", link.port), ssh_server.options)
        entries = await asyncio.to_thread(listed, store)
        assert len(await asyncio.gather(*(read(store, entry) for entry in entries))) == 3
        assert 1 <= link.connections <= 4
        if closes:
            await store.close()

    asyncio.run(use())
    gc.collect()
    wait_until(lambda: link.connections == 0, "the end of all connections", 5)
