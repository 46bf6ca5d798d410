"""Wrong listings and responses cause no crash, no wrong sample and no path outside the cache."""

from __future__ import annotations

import gzip
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache import Snapshot
from tests.accidents import commands
from tests.servers.hostile import SIZE, Listing, Object, Said, content, hostile, listing, row
from tests.servers.redirecting import serving

CLIENTS = pytest.mark.parametrize(
    "client", ["auto", pytest.param("fsspec", marks=pytest.mark.slow)]
)
GOOD = [f"g{number}.npy" for number in range(4)]
ODD = ["../../../../evil.npy", "a/../b.npy", "/abs/evil.npy", "a//b.npy", "./x.npy", "a\tb.npy"]
LONG = "k" * 1020 + ".npy"
LAUGHS = (
    '<!DOCTYPE l [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(2, 10))
    + "]>"
).replace("&a1;", "&a;")


def once(*rows: str, **more: Any) -> Listing:
    """Return a listing of one page."""
    page = listing(*rows, **more)
    return lambda query: Said(page)


def rows(*keys: str) -> list[str]:
    return [row(key) for key in keys]


def config_of(folder: Path, options: dict[str, Any], client: str) -> Path:
    source = {"url": "s3://b/**", "storage_options": options, "client": client}
    return commands.write_config(
        folder / "cache.yaml",
        {"format": "npy", **source},
        sampling={"timeout_seconds": 2, "max_skipped": 0.9},
    )


def cached(cache: Path) -> set[str]:
    """Return the cached keys; check each sample against its key."""
    found = set()
    with Snapshot.take(cache) as snapshot:
        for i in range(len(snapshot)):
            key = snapshot.origin(i).key
            expected = np.frombuffer(key.encode().ljust(16, b"\1")[:16], "u1")
            np.testing.assert_array_equal(snapshot[i]["x"], expected)
            found.add(key)
    return found


def filled(folder: Path, client: str, pages: Listing) -> tuple[set[str], dict[str, Any], str]:
    """Run the service until it ends; return (cached keys, status, stderr)."""
    with hostile(pages) as options:
        config = config_of(folder, options, client)
        ran = commands.growcache("run", config, "--until-full", cwd=folder)
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 0, ran.stderr
    assert {path.name for path in folder.iterdir()} == {"cache", "cache.yaml"}
    return cached(folder / "cache"), commands.status(folder / "cache"), ran.stderr


@CLIENTS
def test_keys_are_never_paths(tmp_path: Path, client: str) -> None:
    outside = set(tmp_path.parent.iterdir())
    keys = [*GOOD, *ODD, LONG, *GOOD]  # with duplicates, and out of order
    too_long = "k" * 100_000
    found, status, said = filled(tmp_path, client, once(*rows(*keys, too_long)))
    assert found == {*keys}
    assert status["holes"] == 0
    assert "version or size: 1" in said
    assert set(tmp_path.parent.iterdir()) == outside


@CLIENTS
def test_sizes_and_versions_that_lie(tmp_path: Path, client: str) -> None:
    wrong = [
        row("smaller.npy", SIZE - 5),
        row("larger.npy", SIZE + 5),
        row("enormous.npy", 2**49),
        row("empty.npy", 0),
        row("other.npy", SIZE, '"other"'),
    ]
    left_out = [
        row("line.npy", SIZE, '"a\r\nX-Evil: 1"'),
        row("ascii.npy", SIZE, '"é"'),
        row("long.npy", SIZE, '"' + "e" * 5000 + '"'),
    ]
    pages = once(*rows(*GOOD), *wrong, *left_out)
    found, status, said = filled(tmp_path, client, pages)
    assert found == {*GOOD}
    assert (status["holes"], status["left_out"]) == (len(wrong) - 1, {"empty": 1})
    assert f"version or size: {len(left_out)}" in said


@pytest.mark.slow
def test_sizes_that_are_none(tmp_path: Path) -> None:
    pages = once(*rows(*GOOD), row("n.npy", -5), row("h.npy", 2**70))
    found, status, _ = filled(tmp_path, "fsspec", pages)
    assert (found, status["holes"]) == ({*GOOD}, 0)


LINKS = [
    "../evil.npy", "%2e%2e/evil.npy", "/evil.npy", "http://OTHER/d/evil.npy", "//OTHER/d/evil.npy",
    "javascript:alert(1).npy", "file:///etc/evil.npy", "a%00b.npy", "a%0Ab.npy", "dead.npy",
    "g0.npy", "./", "../d/", f"{'k' * 9000}.npy",
]  # fmt: skip


@pytest.mark.slow
def test_an_index_page(tmp_path: Path) -> None:
    """Links to other servers are not followed, and dead links are left out."""
    keys = [*(f"d/{name}" for name in GOOD), "d/a%00b.npy", "d/a%0Ab.npy"]
    files = {f"/{key}": content(key) for key in keys} | {"/evil.npy": content("evil")}
    with serving(files={"/d/evil.npy": content("evil")}) as other, serving(files=files) as own:
        host = other.address.removeprefix("http://")
        links = "".join(f'<a href="{link}">x</a>\n' for link in [*GOOD, *LINKS])
        own.pages = {"/d/": links.replace("OTHER", host)}
        config = commands.write_config(
            tmp_path / "cache.yaml",
            {
                "url": f"{own.address}/d/*.npy",
                "format": "npy",
                "storage_options": {"headers": {"X-Api-Key": "secret"}},
            },
            sampling={"timeout_seconds": 2},
        )
        ran = commands.growcache("run", config, "--until-full")
    assert ran.returncode == 0, ran.stderr
    assert "broken links in" in ran.stderr
    assert cached(tmp_path / "cache") == {*keys}
    assert other.asked == []


UNREADABLE: dict[str, Listing] = {
    "a NUL": once(*rows(*GOOD), row("a&#0;b.npy", raw=True)),
    "entities in entities": once(*rows(*GOOD), row("&a9;.npy", raw=True), head=LAUGHS),
    "a file of this machine": once(
        row("&x;.npy", raw=True),
        head='<!DOCTYPE l [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
    ),
    "the half of it": lambda query: Said(listing(*rows(*GOOD))[:-60]),
    "a web page": lambda query: Said(b"<html><body>Welcome<br></body></html>"),
    "nothing": lambda query: Said(b""),
    "packed": lambda query: Said(
        gzip.compress(listing(*rows(*GOOD))), 200, {"Content-Encoding": "gzip"}
    ),
    "a redirect to itself": lambda query: Said(b"", 302, {"Location": "/b?list-type=2"}),
    "204": lambda query: Said(b"", 204),
    "no HTTP": lambda query: Said(raw=b"SSH-2.0-OpenSSH_9\r\n"),
    "no status": lambda query: Said(raw=b"HTTP/1.1 abc OK\r\n\r\n"),
    "no answer": lambda query: Said(raw=b""),
}


@pytest.mark.slow
@CLIENTS
@pytest.mark.parametrize("what", UNREADABLE)
def test_a_listing_that_cannot_be_read_is_waited_for(
    tmp_path: Path, client: str, what: str
) -> None:
    """The service reports the error, waits, and continues once the listing is repaired."""
    mended = False

    def pages(query: dict[str, str]) -> Said:
        return once(*rows(*GOOD))(query) if mended else UNREADABLE[what](query)

    with hostile(pages) as options:
        config = config_of(tmp_path, options, client)
        with commands.running(config, "--until-full") as service:
            commands.wait_until(lambda: "waits for the store" in service.errors)
            assert service.alive
            mended = True
            service.process.wait(300)
        assert service.process.returncode == 0
        assert "Traceback" not in service.errors
    assert cached(tmp_path / "cache") == {*GOOD}


def endless(query: dict[str, str]) -> Said:
    """Return pages that repeat without end, each with a continuation token of its own."""
    number = int(query.get("continuation-token") or 0)
    page = [row(f"{number % 2}/{n:04}.npy") for n in range(1000)]
    return Said(listing(*page, token=str(number + 1)))


@pytest.mark.slow
@CLIENTS
def test_pages_that_come_again_end_the_listing(tmp_path: Path, client: str) -> None:
    with hostile(endless) as options:
        ran = commands.growcache("run", config_of(tmp_path, options, client), "--until-full")
    assert ran.returncode == 1
    assert "repeats its page" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
@CLIENTS
def test_empty_pages_for_ever_can_be_interrupted(tmp_path: Path, client: str) -> None:
    asked: list[str] = []

    def pages(query: dict[str, str]) -> Said:
        asked.append(query.get("continuation-token") or "0")
        return Said(listing(token=str(int(asked[-1]) + 1)))

    with (
        hostile(pages) as options,
        commands.running(config_of(tmp_path, options, client)) as service,
    ):
        commands.wait_until(lambda: len(asked) > 20)
        os.kill(service.process.pid, signal.SIGINT)
        assert service.process.wait(300) == 0
        assert "Traceback" not in service.errors


@pytest.mark.slow
@CLIENTS
def test_ten_megabytes_in_one_page(tmp_path: Path, client: str) -> None:
    keys = [f"{number:06}/{'x' * 80}.npy" for number in range(50_000)]
    page = listing(*rows(*keys))
    assert len(page) > 10_000_000
    with hostile(lambda query: Said(page)) as options:
        config = config_of(tmp_path, options, client)
        ran = commands.growcache("run", config, "--samples", "40", seconds=170)
    assert ran.returncode == 0, ran.stderr
    assert len(cached(tmp_path / "cache")) >= 40


BAD_OBJECTS: dict[str, Object] = {
    "an error in 200": lambda key, data: Said(b"<Error><Code>SlowDown</Code></Error>"),
    "204": lambda key, data: Said(b"", 204),
    "304": lambda key, data: Said(b"", 304),
    "418": lambda key, data: Said(b"", 418),
    "packed": lambda key, data: Said(
        gzip.compress(data), 200, {"Content-Encoding": "gzip", "ETag": '"e"'}
    ),
    "a redirect to itself": lambda key, data: Said(b"", 302, {"Location": f"/b/{key}"}),
    "no HTTP": lambda key, data: Said(raw=b"\0\1\2\r\n"),
    "no answer": lambda key, data: Said(raw=b""),
    "a length of 10^22": lambda key, data: Said(
        raw=b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 99999999999999999999999\r\n\r\nabc'
    ),
    "a chunk of a wrong length": lambda key, data: Said(
        raw=b'HTTP/1.1 200 OK\r\nETag: "e"\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFF\r\nabc'
    ),
    "a megabyte of headers": lambda key, data: Said(
        raw=b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 150_000 + b"\r\n"
    ),
}


@CLIENTS
@pytest.mark.parametrize(
    "what",
    [
        "an error in 200",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in BAD_OBJECTS
            if name != "an error in 200"
        ),
    ],
)
def test_one_object_is_answered_badly(tmp_path: Path, client: str, what: str) -> None:
    """All other objects are cached; the bad one is a hole, or is retried and deferred."""

    def objects(key: str, data: bytes) -> Said | None:
        return BAD_OBJECTS[what](key, data) if key == "bad.npy" else None

    keys = sorted([*GOOD, *(f"h{number}.npy" for number in range(20)), "bad.npy"])
    with hostile(once(*rows(*keys)), objects) as options:
        config = config_of(tmp_path, options, client)
        with commands.running(config) as service:
            commands.wait_for_status(
                tmp_path / "cache",
                lambda found: found["samples"] == len(keys) - 1 and found["last_errors"],
            )
            assert service.alive
            assert "Traceback" not in service.errors
    assert cached(tmp_path / "cache") == {*keys} - {"bad.npy"}
