"""Credentials go to the server that the user named, and to no other."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.accidents import commands
from tests.servers.redirecting import Server, serving

SECRET = "correct-horse"
BASIC = "Basic " + base64.b64encode(f"anna:{SECRET}".encode()).decode()
GIVEN: dict[str, dict[str, Any]] = {
    "headers of the session": {"client_kwargs": {"headers": {"X-Api-Key": SECRET}}},
    "headers": {"headers": {"X-Api-Key": SECRET}},
    "authorization": {"client_kwargs": {"headers": {"Authorization": f"Bearer {SECRET}"}}},
    "cookie header": {"headers": {"Cookie": f"session={SECRET}"}},
    "cookies of the session": {"client_kwargs": {"cookies": {"session": SECRET}}},
    "cookies": {"cookies": {"session": SECRET}},
    "userinfo": {},
}


def objects() -> dict[str, bytes]:
    found = {}
    for number in range(4):
        file = io.BytesIO()
        np.save(file, np.full(8, number))
        found[f"/d/{number}.npy"] = file.getvalue()
    return found


def address(server: Server, given: str) -> str:
    user = f"anna:{SECRET}@" if given == "userinfo" else ""
    return server.address.replace("http://", f"http://{user}")


def filled(tmp_path: Path, url: str | list[str], options: dict[str, Any]) -> tuple[int, str]:
    """Run the service until all samples are cached; return (number of samples, stderr)."""
    config = commands.write_config(
        tmp_path / "cache.yaml",
        {"url": url, "format": "npy", "storage_options": options},
        sampling={"timeout_seconds": 2},
    )
    ran = commands.growcache("run", config, "--until-full")
    return commands.status(tmp_path / "cache").get("samples", 0), ran.stderr


def requests_to(server: Server) -> str:
    return str(server.asked)


def knows_the_secret(server: Server) -> bool:
    return SECRET in requests_to(server) or BASIC in requests_to(server)


@pytest.mark.parametrize(
    "given",
    [
        "headers of the session",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in GIVEN
            if name != "headers of the session"
        ),
    ],
)
def test_another_server_learns_nothing(tmp_path: Path, given: str) -> None:
    with serving(files=objects()) as other, serving(files=objects()) as own:
        own.moved["/d/"] = other.address + "/d/"
        urls = [f"{address(own, given)}/d/{number}.npy" for number in range(4)]
        samples, said = filled(tmp_path, urls, GIVEN[given])
    assert samples == 4, said
    assert other.asked
    assert knows_the_secret(own)
    assert not knows_the_secret(other)


@pytest.mark.slow
@pytest.mark.parametrize("given", GIVEN)
def test_an_index_page_elsewhere_learns_nothing(tmp_path: Path, given: str) -> None:
    with serving(files=objects()) as other, serving(files=objects()) as own:
        own.moved["/d/"] = other.address + "/d/"
        samples, said = filled(tmp_path, f"{address(own, given)}/d/*.npy", GIVEN[given])
    assert samples == 4, said
    assert knows_the_secret(own)
    assert not knows_the_secret(other)


@pytest.mark.slow
def test_a_redirect_on_the_same_server_keeps_them(tmp_path: Path) -> None:
    with serving(files=objects(), needs={"x-api-key": SECRET}) as own:
        own.moved["/old/"] = "/d/"
        url = f"{own.address}/old/*.npy"
        samples, said = filled(tmp_path, url, GIVEN["headers of the session"])
    assert samples == 4, said


def test_a_refusal_elsewhere_names_the_server(tmp_path: Path) -> None:
    with (
        serving(files=objects(), needs={"x-api-key": SECRET}) as other,
        serving(files=objects()) as own,
    ):
        own.moved["/d/"] = other.address + "/d/"
        samples, said = filled(
            tmp_path, f"{own.address}/d/*.npy", GIVEN["headers of the session"]
        )
    assert samples == 0
    assert other.address in said
    assert "Traceback" not in said
    assert not knows_the_secret(other)
