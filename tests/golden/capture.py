"""Fill a cache by a golden configuration, and say in a few words what is in its shards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import growcache
from tests.golden.cases import CASES, Case
from tests.golden.making import CODE

KNOWN = Path(__file__).with_name("digests.json")
Facts = dict[str, int | str]


def captured(name: str, objects: Path, web: str, folder: Path) -> Facts:
    """Return what the shards of a case hold.

    Args:
        name: of the case.
        objects: the folder that the server has; one of its own where the case grows.
        web: the server's address.
        folder: that is empty.
    """
    case = CASES[name]
    (folder / "golden_code.py").write_text(CODE)
    config = folder / "config.yaml"
    config.write_text(written(case, web))
    run(config, "--until-full")
    if case.grows:
        shutil.copytree(objects / "late", objects / "grown", dirs_exist_ok=True)
        run(config, "--until-full", "--refresh")
    return facts(folder / "cache")


def written(case: Case, web: str) -> str:
    values: dict[str, Any] = {
        "source": case.source,
        "sampling": {"shard_samples": 16, "workers": 1, **case.sampling},
        "cache": {"path": "cache", "max_bytes": "8MB", **case.cache},
    }
    if case.split is not None:
        values["split"] = case.split
    return yaml.safe_dump(values).replace("WEB", web)


def run(config: Path, *more: str) -> None:
    command = [sys.executable, "-m", "growcache", "run", config.name, *more]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command,
        cwd=config.parent,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def facts(cache: Path) -> Facts:
    """Return the digest of the shards' files, and of where their samples come from."""
    files = sorted(
        path
        for path in (cache / "shards").rglob("*")
        if path.is_file() and path.suffix != ".json"
    )
    records = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        records.update(f"{path.relative_to(cache)} {len(data)}\n".encode() + data)
    status = json.loads((cache / "status.json").read_text())
    found: Facts = {name: status[name] for name in ("population", "samples", "holes")}
    return found | {"records": records.hexdigest()[:32], "origins": origins(cache)}


def origins(cache: Path) -> str:
    """Return a digest of (number, key, start, stop) of every sample, shard by shard."""
    lines: list[tuple[int, int, str]] = []
    with growcache.Snapshot.take(cache) as snapshot:
        place = 0
        for shard in snapshot.shards:
            for row in range(shard.samples):
                origin = snapshot.origin(place)
                text = f"{origin.key} {origin.start} {origin.stop}"
                lines.append((shard.number, row, text))
                place += 1
    text = "".join(f"{number}:{row} {text}\n" for number, row, text in sorted(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
