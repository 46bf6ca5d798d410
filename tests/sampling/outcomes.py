"""What a run left behind: samples by their object, holes with their reasons, nothing half-written."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from growcache import Snapshot
from growcache.cache.sidecar import Sidecar
from growcache.cache.status_model import Status
from growcache.cli.cli import main
from growcache.schema import Array, Sample
from tests.tables import Table, code

ENDS = "`run` ends, exit code {}"
HOLE = "a hole; all others are cached"
BAD = Table(
    page="reference/inputs.md",
    name="bad objects and code",
    columns=("what is wrong", "what becomes of it", "what is said"),
    order=(
        "an object that is cut off",
        "an empty object (0 bytes)",
        "an object of another format",
        "an object of another shape",
        "an object with another number of dimensions",
        "an object of another dtype",
        "an array of Python objects (pickle)",
        "an array of records (structured dtype)",
        "an array of text",
        "a header that claims 10^12 elements",
        "an object deleted between listing and reading",
        "an object rewritten between listing and reading",
        "an object without permission",
        "a name with control characters",
        "a name of a thousand characters",
        "a folder, a named pipe, a link to nothing, of the objects' name",
        "a file's name that is no UTF-8",
        "no image under the name of one",
        "an image that is cut off",
        "an image that claims 10^10 pixels",
        "a transform that raises",
        "a transform that calls `exit()`",
        "a transform that returns nonsense",
        "a transform that returns an empty dict",
        "a transform that returns another schema",
        "a transform that returns objects",
        "a transform that returns broken Unicode",
        "a transform that returns None",
        "a transform that returns None for all",
        "a transform that raises for all",
        "a transform that takes longer than the timeout",
        "a transform that takes longer again and again",
        "a transform that kills its process",
        "a `read` that raises",
        "a `read` that raises after its first sample",
        "a `read` that returns nonsense",
        "a `read` that yields no sample",
        "a `read` that kills its process",
        "a `sample` that returns None now and then",
        "rows of length zero, one by one",
        "objects of which no two are alike",
        "too many holes",
    ),
)
ODD = Table(
    page="reference/inputs.md",
    name="odd but legal",
    columns=("what is odd", "what arrives in the loader"),
    order=(
        "big-endian",
        "Fortran order",
        "`.npy` header version 2",
        "`.npy` header version 3",
        "a 0-d array",
        "a dimension of length zero",
        "an object without rows among others",
        "bool",
        "float16",
        "complex64",
        "keys with spaces",
        "keys with `#`, `%`, `+`, `&`, `?`",
        "keys with `..`, `.` and `//`",
        "keys in other scripts",
        "keys with control characters",
        'a key and a "folder" of its name',
        "a key of 1,024 bytes",
        "an empty object, as bytes",
        "every byte there is",
        "shapes that vary",
        "few of another shape",
        "10^5 tiny objects and one of 5 GB in one listing",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """A cache whose service has ended.

    Attributes:
        samples: per key of an object what was cached of it.
        holes: per key the reason.
        status: as `growcache status --json` has it.
    """

    samples: dict[str, list[Sample]]
    holes: dict[str, str]
    status: Status


def outcome(cache: Path) -> Outcome:
    """Return what is in a cache, all of it whole: no litter, and `growcache check` is content."""
    assert growcache("check", cache).startswith("all is well with ")
    assert list((cache / "incoming").iterdir()) == []
    assert not [path for path in cache.rglob("*") if path.name.endswith(".tmp")]
    status = Status.from_json(growcache("status", cache, "--json").encode())
    sidecars = [Sidecar.from_bytes(p.read_bytes()) for p in (cache / "shards").glob("*.json")]
    holes = {hole.key: hole.reason for sidecar in sidecars for hole in sidecar.holes}
    assert len(holes) == status.holes
    last = " ".join(status.last_errors)  # `growcache status` shows the end of it
    assert not holes or any(reason in last for reason in holes.values())
    samples: dict[str, list[Sample]] = {}
    if status.samples:
        with Snapshot.take(cache) as snapshot:
            for i in range(len(snapshot)):
                samples.setdefault(snapshot.origin(i).key, []).append(snapshot[i])
    return Outcome(samples, holes, status)


def growcache(command: str, cache: Path, *more: str) -> str:
    """Return what a command prints that ends well."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out):
        code = main([command, str(cache), *more])
    out.seek(0)
    assert code == 0, out.read()
    return out.read()


def npy(array: Array, *, pickled: bool = False) -> bytes:
    """Return an object that holds the array."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


def said(text: str, here: Path) -> str:
    """Return a message as a cell of the table, without what differs from run to run."""
    text = text.strip().removeprefix("growcache: ").replace(str(here), "/home/me")
    text = re.sub(r"\btime \d+\.\d+", "time 1764000000.0", text)
    text = re.sub(r"(found \d+ of time) \d+\.\d+", r"\1 1764000001.0", text)
    return code(re.sub(r"\bafter \d+ s\b", "after 7 s", text))
