"""A foreign cache runs no code: `peek` needs `--config` for code that the cache's files name."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from tests.accidents.commands import growcache, write_config, write_objects

CODE = """
from pathlib import Path

import numpy as np

Path("ran").touch()


def same(sample):
    return sample


def read(object, rng):
    yield {"x": np.frombuffer(object.read(0, 8), np.uint8)}


def decode(data):
    return {"x": np.frombuffer(data[:8], np.uint8)}
"""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sampling.transform": ({"format": "npy"}, {"transform": "mine:same"}),
    "source.format": ({"format": "mine:read"}, {}),
    "source.options.decode": ({"format": "bytes", "options": {"decode": "mine:decode"}}, {}),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    write_objects(folder / "in", count=4, rows=2)
    (folder / "mine.py").write_text(textwrap.dedent(CODE))
    return folder


def forge(identity: Path, parts: dict[str, Any]) -> None:
    """Replace parts of an identity file, and update its checksum."""
    values = json.loads(identity.read_text())
    values["parts"] |= parts
    del values["crc32c"]
    plain = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    checksum = f"{google_crc32c.value(plain.encode()):08x}"
    identity.write_text(json.dumps({"crc32c": checksum, **values}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "named",
    [
        n if n == "sampling.transform" else pytest.param(n, marks=pytest.mark.slow)
        for n in CASES
    ],
)
def test_code_that_a_cache_names_is_not_run(work: Path, named: str) -> None:
    source, sampling = CASES[named]
    config = write_config(
        work / f"{named.replace('.', '_')}.yaml",
        {"url": f"{work}/in/*.npy", **source},
        sampling=sampling,
    )
    done = growcache("run", config, "--until-full", cwd=work)
    assert done.returncode == 0, done.stderr
    (work / "ran").unlink()
    refetch = ("peek", config.with_suffix(""), "--sample", "0:0", "--refetch")
    done = growcache(*refetch, cwd=work)
    assert not (work / "ran").exists()
    assert done.returncode == 2
    assert f"{named}: mine:" in done.stderr
    assert "--config" in done.stderr
    done = growcache(*refetch, "--config", config, cwd=work)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is equal" in done.stdout


@pytest.mark.slow
def test_a_forged_identity_starts_no_process(work: Path) -> None:
    config = write_config(work / "forged.yaml", {"url": f"{work}/in/*.npy", "format": "npy"})
    assert growcache("run", config, "--until-full", cwd=work).returncode == 0
    cache = config.with_suffix("")
    refetch = ("peek", cache, "--sample", "0:0", "--refetch")
    assert growcache(*refetch, cwd=work).returncode == 0  # the identity names no code
    options = {"args": ["touch", "forged-ran"]}
    forge(
        cache / "identity.json",
        {"sampling.transform": "subprocess:Popen", "sampling.transform_options": options},
    )
    for command in (
        refetch,
        ("peek", cache),
        ("check", cache),
        ("export", cache, work / "out"),
    ):
        done = growcache(*command, cwd=work)
        assert "Traceback" not in done.stderr
        assert not (work / "forged-ran").exists()
        if command is refetch:
            assert done.returncode == 2
            assert "subprocess:Popen" in done.stderr


@pytest.mark.slow
def test_a_client_that_runs_what_an_object_says_needs_it_too(work: Path) -> None:
    """fsspec's chained file systems unpack, render and decode content of the store."""
    config = write_config(work / "chain.yaml", {"url": f"{work}/in/*.npy", "format": "npy"})
    assert growcache("run", config, "--until-full", cwd=work).returncode == 0
    url = f"reference://::file://{work}/in/refs.json"
    forge(config.with_suffix("") / "identity.json", {"source.url": [url]})
    done = growcache("peek", config.with_suffix(""), "--sample", "0:0", "--refetch", cwd=work)
    assert done.returncode == 2
    assert "reference://" in done.stderr
