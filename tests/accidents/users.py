"""Commands that run as other users, without root's rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# If the interpreter is in root's home, the command runs in a mount namespace that shows only the
# interpreter of that home.
SHOWN = """
set -e
kept=$(mktemp -d) && mount --bind "$1" "$kept"
mount -t tmpfs -o mode=755 none "$0" && mkdir -p "$1" && mount --bind "$kept" "$1"
shift && exec "$@"
"""


def as_user(uid: int) -> list[str]:
    """Return the command prefix that runs a command as another user."""
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
    interpreter = Path(sys.executable).resolve()
    for above in reversed(interpreter.parents):
        if not above.stat().st_mode & 0o001:
            inner = above / interpreter.relative_to(above).parts[0]
            return ["unshare", "-m", "sh", "-c", SHOWN, str(above), str(inner), *user]
    return user


def can_be_others() -> bool:
    """Return whether a command can run as another user here."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    tried = [*as_user(12345), sys.executable, "-c", "import growcache"]
    return subprocess.run(tried, check=False, capture_output=True, cwd="/").returncode == 0


@contextmanager
def started(uid: int, words: list[str], errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as another user in the background, and kill it at the end of the block."""
    with errors.open("wb") as said:
        process = subprocess.Popen(
            [*as_user(uid), *words],
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            cwd="/",
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def done_as(uid: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command as another user until it exits."""
    return subprocess.run(
        [*as_user(uid), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd="/",
    )
