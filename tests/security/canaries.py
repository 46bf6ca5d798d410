"""Secrets that can be told from everything else, and where they turned up."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from tests.sampling.services import samplers_of

PLACES = ("key", "secret", "token", "password", "signature", "header", "proxy", "variable")


def canary(place: str) -> str:
    """A text that stands nowhere else, of characters that some secrets have."""
    return f"CANARY{place}{hashlib.sha256(place.encode()).hexdigest()[:12]}/+x"


@dataclass
class Ran:
    """What a command put out, and what others could see of its processes."""

    code: int
    output: bytes
    errors: bytes
    commands: list[bytes] = field(default_factory=list)


def growcache(
    arguments: Sequence[str], folder: Path, environment: dict[str, str], seconds: float = 300
) -> Ran:
    """Run the command line to its end, and look at the command lines of its samplers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "growcache", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    seen: list[bytes] = []

    def watch() -> None:
        while process.poll() is None:
            for pid in samplers_of(process.pid):
                try:
                    seen.append(Path(f"/proc/{pid}/cmdline").read_bytes())
                except OSError:
                    continue
            time.sleep(0.05)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        output, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
        watching.join()
    return Ran(process.returncode, output, errors, seen)


def told(secret: str, data: bytes) -> bool:
    """Whether the secret, however it is spelt, stands in the bytes."""
    core = re.match(r"CANARY\w+", secret)
    assert core is not None  # what no spelling changes
    spellings = {secret, quote(secret, safe=""), core[0]}
    return any(spelling.encode() in data for spelling in spellings)


def found_in(secrets: Sequence[str], ran: Ran | None, *folders: Path) -> list[str]:
    """Where any of the secrets stands: in what was said, shown by the kernel, or kept."""
    places = {}
    if ran is not None:
        places = {"stdout": ran.output, "stderr": ran.errors, "argv": b"\0".join(ran.commands)}
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file()]
        places |= {str(path): path.read_bytes() for path in files}
    return [
        f"{secret[6:14]} in {place}: {data[:300]!r}"
        for place, data in places.items()
        for secret in secrets
        if told(secret, data)
    ]
