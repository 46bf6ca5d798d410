"""What a disk may hold after a power cut, by the calls that a writer had made by then.

The model is stricter than file systems are. What was synced stays. Of the rest, each
change of a name and each page of a file's bytes may have arrived or not, one whatever
became of the other; the sync of a file keeps its bytes but not its name, and the sync of a
directory keeps the names in it but not their files' bytes. A rename is one change: a name
is never lost between two directories.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.tracing import Call, unhex

PAGE = 4096

_QUOTED = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_DESCRIPTOR = re.compile(r"^(\d+)<")

Arrives = Callable[[], bool]


@dataclass
class _File:
    """A file's bytes: as they are, as they were when last synced, and which pages changed."""

    now: bytearray = field(default_factory=bytearray)
    kept: bytes = b""
    dirty: set[int] = field(default_factory=set)

    def write(self, at: int, data: bytes) -> None:
        if at + len(data) > len(self.now):
            self.resize(at + len(data))
        self.now[at : at + len(data)] = data
        self.dirty.update(range(at // PAGE, -(-(at + len(data)) // PAGE)))

    def resize(self, size: int) -> None:
        pages = {min(size, len(self.now)) // PAGE, max(size, len(self.now)) // PAGE}
        self.dirty.update(range(min(pages), max(pages) + 1))
        self.now = self.now[:size] + bytes(max(0, size - len(self.now)))

    def sync(self) -> None:
        self.kept = bytes(self.now)
        self.dirty.clear()

    def cut(self, arrives: Arrives) -> bytes:
        """Return what may be found of it."""
        if not self.dirty:
            return self.kept
        size = len(self.now) if arrives() else len(self.kept)
        found = bytearray(self.kept[:size].ljust(size, b"\0"))
        for page in sorted(self.dirty):
            if arrives():
                piece = self.now[page * PAGE : (page + 1) * PAGE]
                found[page * PAGE : page * PAGE + len(piece)] = piece
        return bytes(found[:size])


@dataclass
class _Directory:
    """A directory; its names are in the tree."""


_Node = _File | _Directory
_Names = dict[tuple[int, str], _Node]  # (identity of the directory, name) → what it names


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of names: some go, one may come."""

    gone: tuple[tuple[int, str], ...]
    comes: tuple[int, str] | None
    node: _Node

    def touches(self, directory: _Node) -> bool:
        places = (*self.gone, *([self.comes] if self.comes is not None else []))
        return any(place[0] == id(directory) for place in places)

    def make(self, names: _Names) -> None:
        for place in self.gone:
            if names.get(place) is self.node:
                del names[place]
        if self.comes is not None:
            names[self.comes] = self.node


class Disk:
    """A directory tree to which recorded calls happen.

    Args:
        base: exists, durably, and is empty; calls on other paths are ignored.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._root = _Directory()
        self._now: _Names = {}
        self._kept: _Names = {}
        self._changes: list[_Change] = []
        self._positions: dict[int, int] = {}  # by descriptor, of those made by a creating open

    def apply(self, call: Call) -> None:
        """Let the call happen."""
        inside = all(path.startswith(str(self._base)) for path in call.paths)
        if call.result < 0 or not inside:
            return
        getattr(self, f"_{call.name}", lambda call: None)(call)

    # Names

    def _place(self, path: str) -> tuple[int, str]:
        *above, name = Path(path).relative_to(self._base).parts
        node: _Node = self._root
        for part in above:
            node = self._now[id(node), part]
        return id(node), name

    def _node(self, path: str) -> _Node:
        return self._root if Path(path) == self._base else self._now[self._place(path)]

    def _file(self, call: Call) -> _File:
        node = self._node(call.paths[0])
        assert isinstance(node, _File), call
        return node

    def _change(self, change: _Change) -> None:
        change.make(self._now)
        self._changes.append(change)

    def _openat(self, call: Call) -> None:
        place = self._place(call.paths[0])
        if place not in self._now:
            self._change(_Change((), place, _File()))
        elif "O_TRUNC" in call.arguments:
            self._file(call).resize(0)
        self._positions[call.result] = 0

    def _mkdir(self, call: Call) -> None:
        self._change(_Change((), self._place(call.paths[0]), _Directory()))

    _mkdirat = _mkdir

    def _unlink(self, call: Call) -> None:
        place = self._place(call.paths[0])
        self._change(_Change((place,), None, self._now[place]))

    _rmdir = _unlinkat = _unlink  # a folder, too, with AT_REMOVEDIR

    def _rename(self, call: Call) -> None:
        before, after = map(self._place, call.paths)
        self._change(_Change((before,), after, self._now[before]))

    _renameat = _rename

    # Bytes

    def _pwrite64(self, call: Call) -> None:
        at = int(call.arguments.rpartition(", ")[2])
        self._file(call).write(at, _written(call))

    def _write(self, call: Call) -> None:
        match = _DESCRIPTOR.match(call.arguments)
        assert match is not None
        at = self._positions.get(descriptor := int(match[1]), 0)
        self._positions[descriptor] = at + call.result
        self._file(call).write(at, _written(call))

    _writev = _write

    def _fallocate(self, call: Call) -> None:
        file = self._file(call)
        start, length = map(int, call.arguments.split(", ")[-2:])
        file.resize(max(len(file.now), start + length))

    def _ftruncate(self, call: Call) -> None:
        self._file(call).resize(int(call.arguments.rpartition(", ")[2]))

    # What stays

    def _fsync(self, call: Call) -> None:
        node = self._node(call.paths[0])
        if isinstance(node, _File):
            node.sync()
            return
        for change in (touched := [c for c in self._changes if c.touches(node)]):
            change.make(self._kept)
        self._changes = [change for change in self._changes if change not in touched]

    _fdatasync = _fsync

    # The cut

    def cut(self, names: Arrives, data: Arrives) -> dict[str, bytes | None]:
        """Return a tree that a power cut may leave, None for directories.

        Args:
            names: asked for each change of a name since the last sync: has it arrived?
            data: the same for each page.
        """
        found = dict(self._kept)
        for change in self._changes:
            if names():
                change.make(found)
        return _flat(found, self._root, data)


def _flat(
    names: Mapping[tuple[int, str], _Node], root: _Node, data: Arrives
) -> dict[str, bytes | None]:
    below: dict[int, list[tuple[str, _Node]]] = {}
    for (directory, name), node in names.items():
        below.setdefault(directory, []).append((name, node))
    tree: dict[str, bytes | None] = {}
    rest: list[tuple[str, _Node]] = [("", root)]
    while rest:
        path, node = rest.pop()
        for name, inner in below.get(id(node), ()):
            tree[f"{path}{name}"] = None if isinstance(inner, _Directory) else inner.cut(data)
            rest.append((f"{path}{name}/", inner))
    return tree


def lay_out(tree: Mapping[str, bytes | None], base: Path) -> None:
    """Make the directories and files."""
    for path, content in sorted(tree.items()):
        if content is None:
            (base / path).mkdir(mode=0o700)
        else:
            (base / path).write_bytes(content)


def kinds_of_cut(rng: random.Random) -> Iterable[tuple[str, Arrives, Arrives]]:
    """Return the extremes, and something in between: what of the names, of the bytes arrived."""

    def some() -> bool:
        return rng.random() < 0.5

    yield "nothing that was not synced", lambda: False, lambda: False
    yield "all names, no bytes", lambda: True, lambda: False
    yield "all bytes, no names", lambda: False, lambda: True
    yield "some of both", some, some


def _written(call: Call) -> bytes:
    data = b"".join(map(unhex, _QUOTED.findall(call.arguments)))
    return data[: call.result]
