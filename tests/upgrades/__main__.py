"""Keep the caches that an earlier growcache fills: ``python -m tests.upgrades COMMIT``."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.upgrades.making import CACHES, CONFIGS, DRAWN, run_growcache, write_inputs

ROOT = Path(__file__).parents[2]
# Locks are made anew at each start, and nothing is learned from a megabyte of zeros.
LEFT_OUT = {"supervisor.lock", "samplers.lock", "ballast"}


def main(commit: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree, work = Path(folder, "tree"), Path(folder, "work")
        check_out(commit, tree)
        work.mkdir()
        write_inputs(work)
        for name in CONFIGS:
            done = run_growcache(work, name, "--samples", str(DRAWN), tree=tree)
            assert done.returncode == 0, done.stderr
            pack(work / name, CACHES / f"{commit}-{name}.tar.xz")


def check_out(commit: str, tree: Path) -> None:
    command = ["git", "archive", commit, "growcache"]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")


def pack(cache: Path, target: Path) -> None:
    def kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(info.name).name in LEFT_OUT else info

    with tarfile.open(target, "w:xz") as files:
        files.add(cache, cache.name, filter=kept)
    print(target, target.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1])
