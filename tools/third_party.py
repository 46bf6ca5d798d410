"""List the licences of all that growcache may install: ``make third-party`` writes THIRD_PARTY.md.

It reads the metadata of the environment that it runs in, in which every extra must be installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).parent.parent / "THIRD_PARTY.md"
# Licences that may ask for source code if a package is passed on. MPL, LGPL and EPL ask it only for their own files.
COPYLEFT = re.compile(r"GPL|MPL|EPL|CDDL|EUPL|OSL", re.IGNORECASE)
UNSTATED = {"namex": "Apache-2.0"}  # its repository says so, its metadata nothing
SPDX = {  # what older metadata says -> the identifier
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD 3-Clause": "BSD-3-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Dual License": "Apache-2.0 OR BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
}


@dataclass(frozen=True)
class Package:
    """A row of the page."""

    name: str
    version: str
    licence: str
    needed_by: str  # "growcache", an extra, or both


def main() -> int:
    found = packages("growcache")
    PAGE.write_text(page(found), encoding="utf-8")
    print(f"{PAGE.name}: {len(found)} packages")
    return 0


def packages(root: str) -> list[Package]:
    """Return all that the package and its extras need, directly or not, by name."""
    asked: dict[str, set[str]] = {}
    needs = {"growcache": _needs(root, "")}
    for extra in distribution(root).metadata.get_all("Provides-Extra", []):
        needs[extra] = _needs(root, extra)
    for who, names in needs.items():
        for name in names - ({*needs["growcache"]} if who != "growcache" else set()):
            asked.setdefault(name, set()).add(who)
    return sorted(map(_package, asked, asked.values()), key=lambda one: one.name.lower())


def _needs(root: str, extra: str) -> set[str]:
    """Return the names of what is installed because of one extra; an empty text is none."""
    seen: set[tuple[str, str]] = set()
    left = [(root, extra)]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += _required(*one)
    return {name for name, _ in seen} - {canonicalize_name(root), root}


def _required(name: str, extra: str) -> Iterator[tuple[str, str]]:
    found = _installed(name)
    for text in (found.requires if found else None) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": extra}):
            for wanted in requirement.extras or {""}:
                yield canonicalize_name(requirement.name), wanted
            yield canonicalize_name(requirement.name), ""


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _package(name: str, needed_by: set[str]) -> Package:
    found = _installed(name)
    if found is None:
        raise SystemExit(
            f"{name} is not installed; run `make third-party`, which installs all extras"
        )
    where = "growcache" if "growcache" in needed_by else ", ".join(sorted(needed_by))
    stated = licence(found.metadata.json)
    return Package(found.name, found.version, stated or UNSTATED[name], where)


def licence(metadata: Mapping[str, object]) -> str:
    """Return a licence as the metadata says it: the expression, else a short text, else classifiers.

    >>> licence({"license_expression": "MIT"}), licence({"license": "Apache License 2.0"})
    ('MIT', 'Apache-2.0')
    >>> licence({"license": "Copyright (c) 2001, and the whole text of a licence", "classifier": ["License :: OSI Approved :: BSD License"]})
    'BSD'
    """
    if expression := metadata.get("license_expression"):
        return str(expression)
    text = str(metadata.get("license") or "").strip()
    if text and len(text) < 40 and "\n" not in text:
        return SPDX.get(text, text)
    classifiers = metadata.get("classifier")
    names = [
        str(one).rpartition(" :: ")[2]
        for one in (classifiers if isinstance(classifiers, list) else [])
        if str(one).startswith("License :: ")
    ]
    return " OR ".join(SPDX.get(name, name) for name in names)


def page(found: list[Package]) -> str:
    copyleft = [one for one in found if COPYLEFT.search(one.licence)]
    return "\n".join(
        [
            "# Licences of what growcache installs",
            "",
            "growcache is under [Apache-2.0](LICENSE). Its wheel contains one file of others: uPlot, under",
            "[MIT](growcache/monitor/web/LICENSE.uPlot.txt). The packages below are installed with it, under licences of",
            "their own. `make third-party` writes this page from their metadata.",
            "",
            "## Copyleft",
            "",
            "These licences may ask you for source code if you pass the package on. MPL-2.0, EPL-2.0 and LGPL ask it only for",
            "their own files, not for a program that imports them. Without the extra, a package is not installed.",
            "",
            *_table(copyleft),
            "",
            "Wheels may bundle libraries in C with licences of their own. `soundfile` bundles libsndfile (LGPL-2.1-or-later);",
            "`numpy` and `scipy` bundle GCC's runtime libraries (GPL-3.0 with the runtime exception, which allows any use).",
            "",
            "## All",
            "",
            *_table(found),
            "",
        ]
    )


def _table(found: list[Package]) -> list[str]:
    rows = [
        f"| {one.name} | {one.version} | {one.licence} | {one.needed_by} |" for one in found
    ]
    return ["| package | version | licence | needed by |", "| --- | --- | --- | --- |", *rows]


if __name__ == "__main__":
    sys.exit(main())
