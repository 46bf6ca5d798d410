"""The state of one pickle's interpretation: position, stack, memo and limits."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

from growcache.errors import FormatError
from growcache.pickles.makers import (
    MAKERS,
    SHORT_TEXT,
    CopyBudget,
    KeyChecker,
    NamedFunction,
    Unfinished,
    stand_in_for,
)

MOST_OBJECTS = 4_000_000  # containers, marks and memo entries, of at most 200 bytes; each takes 1 to 3 bytes of a pickle
_DICTS = (dict, OrderedDict, defaultdict)


class Machine:
    """The position in a pickle, the stack, and the remaining budget.

    Everything on the stack was made here or in `makers`. Only functions of `makers.CALLS` are
    called, and no object's attributes are read or set.
    """

    __slots__ = (
        "at", "below", "budget", "data", "keys", "left", "memo", "stack", "unfinished",
    )  # fmt: skip

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks beneath each mark
        self.memo: dict[int, Any] = {}
        self.keys = KeyChecker()
        self.budget = CopyBudget(len(data))
        self.left = MOST_OBJECTS
        self.unfinished = 0

    def take(self, count: int) -> bytes:
        start, stop = self.at, self.at + count
        if count < 0 or stop > len(self.data):
            self.at = len(self.data)
            raise IndexError
        self.at = stop
        return self.data[start:stop]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def line(self) -> bytes:
        return self.take(self.data.index(b"\n", self.at) + 1 - self.at)[:-1]

    def spend(self) -> None:
        """Count an object that takes more memory than its instruction has bytes."""
        self.left -= 1
        if self.left < 0:
            raise FormatError(
                f"a pickle has more than {MOST_OBJECTS:,} containers; refused", code="GC304"
            )

    def marked(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def keep(self, place: int) -> None:
        self.left -= 1
        value = self.stack[-1]
        if type(value) is Unfinished:
            value.places.append(place)
        elif self.left < 0:
            self.spend()
        self.memo[place] = value

    def recall(self, place: int) -> None:
        value = self.memo[place]
        if type(value) is Unfinished:
            raise FormatError(
                "a pickle uses an array or dtype before it has values; refused", code="GC304"
            )
        self.stack.append(value)

    def call(self) -> None:
        arguments = self.stack.pop()
        maker = MAKERS.get(id(self.stack.pop()))
        if maker is None or type(arguments) is not tuple:
            raise FormatError(
                "a pickle calls something that is not a function; refused", code="GC304"
            )
        self.spend()
        made = maker(arguments, self.budget, self.keys)
        self.unfinished += type(made) is Unfinished
        self.stack.append(made)

    def build(self) -> None:
        state = self.stack.pop()
        unfinished = self.stack.pop()
        if type(unfinished) is not Unfinished:
            kind = (
                "function"
                if isinstance(unfinished, NamedFunction)
                else type(unfinished).__name__
            )
            raise FormatError(f"a pickle sets attributes of a {kind}; refused", code="GC304")
        made = unfinished.finish(state, self.budget)
        for place in unfinished.places:
            if self.memo.get(place) is unfinished:
                self.memo[place] = made
        self.unfinished -= 1
        self.stack.append(made)

    def name(self, module: str, name: str) -> None:
        self.stack.append(stand_in_for(module, name))

    def put_in(self, items: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) not in _DICTS or len(items) % 2:
            raise TypeError
        check, keys = self.keys.check, items[::2]
        for key in keys:
            if type(key) is not str or len(key) > SHORT_TEXT:
                check(key)
        into.update(zip(keys, items[1::2], strict=True))

    def made(self, value: object) -> None:
        self.left -= 1
        if self.left < 0:
            self.spend()
        self.stack.append(value)
