"""A case of the matrix, and its run: a real service fills a cache, whose samples are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import growcache
from growcache.usercode import child_environment

RUN_SECONDS = 120.0
Values = Mapping[str, Any]  # arrays, bytes and str by field


@dataclass(frozen=True, slots=True)
class Place:
    """An origin: which rows, values or bytes of which file a sample is."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the matrix.

    Args:
        writer: the library, and the call where it matters.
        holds: what it writes, in a few words.
        format: of the source.
        write: writes the files into an empty folder.
        expected: what the library itself reads at a place.
        samples: that all files have together.
        options: of the format.
        url: of the objects, below the folder.
        source: further settings of the source; ``{files}`` in them is the folder.
        sampling: settings of the sampling.
        needs: modules without which the case is skipped.
        refused: a part of the last line of a run that must refuse the files.
    """

    writer: str
    holds: str
    format: str
    write: Callable[[Path], None]
    expected: Callable[[Place], Values] | None = None
    samples: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    url: str = "*"
    source: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    refused: str = ""

    @property
    def name(self) -> str:
        options = json.dumps(self.options) if self.options else "no options"
        return f"{self.writer}: {self.holds}; {self.format}, {options}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a run of a case came to, in one cell of the table; ``problems`` are empty if it is right."""

    result: str
    problems: tuple[str, ...] = ()


def run_case(case: Case, folder: Path) -> Finding:
    """Write the files of a case, fill a cache with them, and compare all of its samples."""
    files, cache = folder / "files", folder / "cache"
    files.mkdir(parents=True)
    case.write(files)
    config = _write_config(case, files, cache)
    ended = subprocess.run(
        [sys.executable, "-m", "growcache", "run", str(config), "--until-full"],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    said = ended.stderr.strip().splitlines()
    last = said[-1] if said else ""
    if case.refused:
        right = ended.returncode != 0 and case.refused in last
        problems = (
            () if right else (f"expected a refusal with {case.refused!r}, found {last!r}",)
        )
        return Finding(f"refused: {case.refused}", problems)
    if ended.returncode:
        return Finding("failed", tuple(said[-5:]))
    return _compare(case, cache)


def _write_config(case: Case, files: Path, cache: Path) -> Path:
    settings = {
        "source": {
            "url": f"{files}/{case.url}",
            "format": case.format,
            "options": dict(case.options),
            **case.source,
        },
        "sampling": {"workers": 1, **case.sampling},
        "cache": {"path": str(cache), "max_bytes": "100MB", "min_free": 0},
    }
    path = cache.with_name("config.yaml")
    written = yaml.safe_dump(settings).replace("{files}", str(files))
    path.write_text(written, encoding="utf-8")
    return path


def _compare(case: Case, cache: Path) -> Finding:
    problems: list[str] = []
    assert case.expected is not None
    with growcache.Snapshot.take(cache) as snapshot:
        count = len(snapshot)
        if count != case.samples:
            problems.append(f"expected {case.samples} samples, found {count}")
        seen = set()
        for i in range(count):
            origin = snapshot.origin(i)
            place = Place(Path("/") / origin.key, origin.start, origin.stop)
            seen.add(place)
            problems += differences(case.expected(place), snapshot[i], place)
        if len(seen) != count:
            problems.append(
                f"{count - len(seen)} of {count} samples have the origin of another"
            )
        shown = described(snapshot[0]) if count else "nothing"
    return Finding(f"{count} of {shown}", tuple(problems))


def differences(expected: Values, found: Values, place: Place) -> list[str]:
    at = f"{place.path.name}[{place.start}:{place.stop}]"
    if sorted(expected) != sorted(found):
        return [f"{at}: expected fields {sorted(expected)}, found {sorted(found)}"]
    return [
        f"{at}.{name}: expected {_shown(expected[name])}, found {_shown(found[name])}"
        for name in expected
        if not is_same(expected[name], found[name])
    ]


def is_same(expected: Any, found: Any) -> bool:
    """Whether two values are equal; dtypes may differ in their byte order only."""
    if isinstance(expected, bytes | str):
        value = found.item() if isinstance(found, np.ndarray) and found.ndim == 0 else found
        return type(value) is type(expected) and bool(value == expected)
    wanted, got = np.asarray(expected), np.asarray(found)
    same_dtype = wanted.dtype.newbyteorder("=") == got.dtype.newbyteorder("=")
    numbers = wanted.dtype.kind in "fc"
    return (
        same_dtype
        and wanted.shape == got.shape
        and bool(np.array_equal(wanted, got, equal_nan=numbers))
    )


def described(sample: Values) -> str:
    """Say the fields of a sample.

    >>> described({"x": np.zeros((3, 4), "<f4"), "label": "rest"})
    'x float32 [3, 4], label str'
    """
    return ", ".join(f"{name} {_kind(value)}" for name, value in sample.items())


def _kind(value: Any) -> str:
    if isinstance(value, bytes | str):
        return type(value).__name__
    return f"{value.dtype.name} {list(value.shape)}" if value.ndim else value.dtype.name


def _shown(value: Any) -> str:
    if isinstance(value, bytes | str):
        return repr(value[:40])
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)} {array.ravel()[:4].tolist()}"
