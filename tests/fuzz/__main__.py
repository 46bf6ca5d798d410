"""Look for bytes that a target does not bear: ``python -m tests.fuzz [TARGET …] [--seconds N]``.

Guided by the lines that are reached (atheris). What is found is written to the corpus as
``crash-…``; mend it, give the file a name, and the everyday suite tries it for ever.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
LARGEST = 4096  # bytes of an input
MEGABYTES = (
    3072  # of memory, above which an input is a finding; an image may take a third of it
)
ONE_SECONDS = 20  # that one input may take


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return _fuzz(given.targets[0], given.seconds)
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in given.targets or list(TARGETS):
        print(f"{name}: {given.seconds} s", flush=True)
        words = [
            sys.executable,
            "-m",
            "tests.fuzz",
            name,
            "--one",
            f"--seconds={given.seconds}",
        ]
        if subprocess.run(words, check=False).returncode:
            failed.append(name)
    print(f"found something: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


def _fuzz(name: str, seconds: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["growcache"]):
        from tests.fuzz.targets import TARGETS
    kept = CORPUS / name
    kept.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as grown:
        options = [
            f"-max_total_time={seconds}", f"-max_len={LARGEST}", f"-rss_limit_mb={MEGABYTES}",
            f"-malloc_limit_mb={MEGABYTES}", f"-timeout={ONE_SECONDS}", "-print_final_stats=1",
            "-verbosity=0", f"-artifact_prefix={kept}/", grown, str(kept),
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *options], TARGETS[name])
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
