"""Build a release, check it, and print how to upload it. Nothing is uploaded: ``make release``.

The wheel and the sdist are built twice from the commit, in different folders, with another umask and
time zone. Both builds must be equal byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LICENCES = ("LICENSE", "growcache/monitor/web/LICENSE.uPlot.txt")
SDIST_NEEDS = ("pyproject.toml", "PKG-INFO", "README.md", "CHANGELOG.md", "tests/conftest.py")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    version = stated_version((ROOT / "growcache/__init__.py").read_text(encoding="utf-8"))
    problems = source_problems(
        version,
        changelog=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        citation=(ROOT / "CITATION.cff").read_text(encoding="utf-8"),
        changes=_git("status", "--porcelain"),
        tags_elsewhere=set(_git("tag").split()) - set(_git("tag", "--points-at").split()),
    )
    if problems:
        return _refuse(problems)
    with tempfile.TemporaryDirectory(prefix="growcache-release-") as folder:
        return _release(version, Path(folder), given.output)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist")
    return parser.parse_args(arguments)


def _release(version: str, scratch: Path, output: Path) -> int:
    print(f"growcache {version}, commit {_git('rev-parse', '--short', 'HEAD').strip()}")
    first = build(scratch / "one", umask=0o022, zone="UTC")
    second = build(scratch / "two, elsewhere", umask=0o077, zone="Asia/Kathmandu")
    problems = [
        f"two builds of {name} differ; see diffoscope" for name in differing(first, second)
    ]
    problems += artefact_problems(version, first, tracked=_git("ls-files").splitlines())
    if problems:
        return _refuse(problems)
    print("two builds are equal, and hold what they should")
    if not (_passes_checkers(first) and _installs(version, first, scratch / "venv")):
        return 1
    output.mkdir(parents=True, exist_ok=True)
    for path in first:
        shutil.copy2(path, output)
        print(f"{_digest(path)}  {output / path.name}")
    print(next_steps(version, [output / path.name for path in first]))
    return 0


def stated_version(text: str) -> str:
    """Return the version in the text of ``growcache/__init__.py``.

    >>> stated_version('__version__ = "1.2.3"')
    '1.2.3'
    """
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError('growcache/__init__.py: expected a line __version__ = "…"')
    return found[1]


def source_problems(
    version: str, *, changelog: str, citation: str, changes: str, tags_elsewhere: set[str]
) -> list[str]:
    """Return what keeps this tree from being released, in words."""
    found = []
    if changes.strip():
        found.append(f"the tree has changes that are not committed:\n{changes.rstrip()}")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M):
        found.append(f"CHANGELOG.md has no section `## [{version}] - YEAR-MONTH-DAY`")
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## )", changelog, re.M | re.S)
    if unreleased and unreleased[1].strip():
        found.append("CHANGELOG.md has lines under [Unreleased]; move them to the version")
    if f"\nversion: {version}\n" not in citation:
        found.append(f"CITATION.cff does not say version: {version}")
    if f"v{version}" in tags_elsewhere:
        found.append(f"the tag v{version} is on another commit; raise the version")
    return found


def build(folder: Path, umask: int, zone: str) -> list[Path]:
    """Build sdist and wheel from the commit, not from the folder, where other files may be."""
    source, built = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    archive = folder / "commit.tar"
    _git("archive", "--output", str(archive), "HEAD")
    shutil.unpack_archive(archive, source, filter="data")
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": _git("log", "-1", "--format=%ct").strip(),
        "TZ": zone,
    }
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built)]
    done = subprocess.run(
        [*command, str(source)], env=environment, umask=umask, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"the build failed:\n{done.stdout}{done.stderr}")
    return sorted(built.iterdir())


def differing(first: Sequence[Path], second: Sequence[Path]) -> list[str]:
    """Return the names of files that only one build has, or that differ."""
    digests = [{path.name: _digest(path) for path in paths} for paths in (first, second)]
    names = digests[0].keys() | digests[1].keys()
    return sorted(name for name in names if digests[0].get(name) != digests[1].get(name))


def artefact_problems(
    version: str, artefacts: Iterable[Path], tracked: Sequence[str]
) -> list[str]:
    """Return what a wheel and an sdist lack, or hold too much."""
    found = []
    for path in artefacts:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                found += wheel_problems(version, archive.namelist(), tracked)
                metadata = archive.read(f"growcache-{version}.dist-info/METADATA").decode()
                found += description_problems(metadata)
        else:
            with tarfile.open(path) as tar:
                found += sdist_problems(version, tar.getnames(), tracked)
    return found


def wheel_problems(version: str, names: Iterable[str], tracked: Iterable[str]) -> list[str]:
    """Compare a wheel with the package in git: all of it, and nothing else.

    >>> wheel_problems("1.0", ["growcache/a.py", "tests/b.py"], ["growcache/a.py", "growcache/py.typed"])[-2:]
    ['the wheel lacks growcache/py.typed', 'the wheel should not have tests/b.py']
    """
    info = f"growcache-{version}.dist-info"
    package = {packaged for name in tracked if (packaged := _in_wheel(name))}
    licences = {f"{info}/licenses/{name}" for name in LICENCES}
    held = {name for name in names if not name.startswith(f"{info}/")}
    missing = (package - held) | (licences - set(names))
    return [
        *(f"the wheel lacks {name}" for name in sorted(missing)),
        *(f"the wheel should not have {name}" for name in sorted(held - package)),
    ]


def _in_wheel(name: str) -> str:
    """Return where the wheel holds a tracked file; empty if it does not."""
    if name.startswith("docs/tutorials/") and name.endswith(".ipynb"):  # see force-include
        return f"growcache/tutorials/{Path(name).name}"
    return name if name.startswith("growcache/") else ""


def description_problems(metadata: str) -> list[str]:
    """Return the links of a description that lead nowhere from a package index.

    >>> description_problems("[a](https://a.org), [b](docs/b.md)")
    ['the description on an index would have the broken link docs/b.md']
    """
    return [
        f"the description on an index would have the broken link {link}"
        for link in re.findall(r"\]\(([^)]*)\)", metadata)
        if not link.startswith(("https:", "http:"))
    ]


def sdist_problems(version: str, names: Iterable[str], tracked: Iterable[str]) -> list[str]:
    """Compare an sdist with git: the package and what it is built from, and only tracked files."""
    held = {name.removeprefix(f"growcache-{version}/") for name in names}
    package = {name for name in tracked if name.startswith("growcache/")}
    missing = ({*package, *LICENCES, *SDIST_NEEDS}) - held
    extra = held - set(tracked) - {"PKG-INFO"}
    return [
        *(f"the sdist lacks {name}" for name in sorted(missing)),
        *(f"the sdist has {name}, which git does not track" for name in sorted(extra)),
    ]


def next_steps(version: str, artefacts: Sequence[Path]) -> str:
    files = " ".join(map(str, artefacts))
    return f"""
Ready. Upload it yourself, when its tests have passed (make test-all):

  git tag -a v{version} -m "growcache {version}"
  {sys.executable} -m twine upload {files}
  git push origin v{version}"""


def _passes_checkers(artefacts: Sequence[Path]) -> bool:
    environment = Path(sys.prefix)
    cffconvert = environment / "citation/bin/cffconvert"  # see pyproject.toml
    checks = [
        [str(environment / "bin/twine"), "check", "--strict", *map(str, artefacts)],
        [str(cffconvert), "--validate", "-i", str(ROOT / "CITATION.cff")],
    ]
    return all(subprocess.run(command, check=False).returncode == 0 for command in checks)


def _installs(version: str, artefacts: Sequence[Path], environment: Path) -> bool:
    """Install the wheel into a new environment, outside this tree, and run it once."""
    (wheel,) = (path for path in artefacts if path.suffix == ".whl")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", str(wheel)], check=True)
    asked = [str(environment / "bin/growcache"), "--version"]
    said = subprocess.run(asked, cwd=environment, check=True, capture_output=True, text=True)
    if said.stdout.split() == ["growcache", version]:
        print(f"the wheel installs, and says {said.stdout.strip()}")
        return True
    print(f"expected growcache {version}, found {said.stdout.strip()}", file=sys.stderr)
    return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _refuse(problems: Iterable[str]) -> int:
    for problem in problems:
        print(f"not ready: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
