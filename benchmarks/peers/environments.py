"""The contestants' environments, made by `venv` and pip from the pinned files next to this one.

torch comes first and with its version, because as another package's requirement it would be the
newest one, with gigabytes of CUDA. Which build of that version arrives is up to pip's
configuration, and either will do.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.roster import OWN

PINNED = Path(__file__).parent / "environments"
TORCH = "torch==2.13.0"
MARK = "installed"
NEWER = "# Needs Python 3.12"  # the first line of what this Python may be too old for


def python_of(environment: str, folder: Path) -> Path:
    """Return the interpreter of an environment."""
    return Path(sys.executable) if environment == OWN else folder / environment / "bin/python"


def made(environment: str, folder: Path, pins: Path = PINNED) -> Path:
    """Return the interpreter of an environment, which is made where it is not there yet."""
    python = python_of(environment, folder)
    if environment == OWN:
        return python
    pinned = pins / f"{environment}.txt"
    digest = hashlib.sha256(pinned.read_bytes()).hexdigest()
    mark = folder / environment / MARK
    if not mark.exists() or mark.read_text(encoding="utf-8") != digest:
        print(f"installing {pinned.name} into {folder / environment} …", flush=True)
        install(python, pinned)
        mark.write_text(digest, encoding="utf-8")
    return python


def install(python: Path, pinned: Path) -> None:
    """Make an environment of what a file pins.

    Raises:
        subprocess.CalledProcessError: pip's words stand above.
    """
    text = pinned.read_text(encoding="utf-8")
    if not python.exists():
        base = _newer_python() if text.startswith(NEWER) else sys.executable
        subprocess.run([base, "-m", "venv", python.parent.parent], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True)
    if TORCH in text.splitlines():
        subprocess.run([*pip, TORCH], check=True)
    subprocess.run(
        [*pip, "--constraint", str(pinned), "--requirement", str(pinned)], check=True
    )


def _newer_python() -> str:
    if sys.version_info >= (3, 12):
        return sys.executable
    found = (shutil.which(f"python3.{minor}") for minor in (13, 12, 14))
    return next(filter(None, found), None) or sys.exit("no Python 3.12 or newer on the PATH")
