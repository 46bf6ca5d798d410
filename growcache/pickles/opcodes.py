"""The opcodes of pickles, protocols 0 to 5, and the loop that interprets them."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any

from growcache.errors import FormatError
from growcache.pickles.machine import Machine
from growcache.pickles.makers import Unfinished


def _mark(m: Machine) -> None:
    m.spend()
    m.below.append(m.stack)
    m.stack = []


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.marked()


def _pop_mark(m: Machine) -> None:
    m.marked()


def _dup(m: Machine) -> None:
    if type(m.stack[-1]) is Unfinished:
        raise TypeError
    m.stack.append(m.stack[-1])


def _protocol(m: Machine) -> None:
    m.take(1)  # the number is ignored: only the instructions count


def _frame(m: Machine) -> None:
    if m.number(8) > len(m.data) - m.at:
        m.at = len(m.data)
        raise IndexError


def _int(m: Machine) -> None:
    text = m.line()
    m.stack.append({b"00": False, b"01": True}[text] if text[:1] == b"0" != text else int(text))


def _long(m: Machine) -> None:
    m.stack.append(int(m.line().rstrip(b"L")))


def _string(m: Machine) -> None:
    text = m.line()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError
    decoded = codecs.escape_decode(text[1:-1])[0]
    m.stack.append(decoded.decode("latin-1"))


def _dict(m: Machine) -> None:
    items = m.marked()
    m.made({})
    m.put_in(items)


def _list(m: Machine) -> None:
    m.made(m.marked())


def _tuple(m: Machine) -> None:
    m.made(tuple(m.marked()))


def _tuple_of(count: int) -> Callable[[Machine], None]:
    def step(m: Machine) -> None:
        items = tuple(m.stack[-count:])
        if len(items) < count:
            raise IndexError
        m.stack[-count:] = [items]
        m.spend()

    return step


def _frozenset(m: Machine) -> None:
    items = m.marked()
    for item in items:
        m.keys.check(item)
    m.made(frozenset(items))


def _add(m: Machine) -> None:
    items = m.marked()
    into = m.stack[-1]
    if type(into) is not set:
        raise TypeError
    for item in items:
        m.keys.check(item)
    into.update(items)


def _append(m: Machine) -> None:
    _extend(m, [m.stack.pop()])


def _extend(m: Machine, items: list[Any]) -> None:
    into = m.stack[-1]
    if type(into) is not list:
        raise TypeError
    into.extend(items)


def _set_item(m: Machine) -> None:
    value = m.stack.pop()
    m.put_in([m.stack.pop(), value])


def _global(m: Machine) -> None:
    module, name = m.line().decode(), m.line().decode()
    m.name(module, name)


def _inst(m: Machine) -> None:
    module, name = m.line().decode(), m.line().decode()
    m.name(module, name)
    raise FormatError("a pickle makes an object of a class; refused", code="GC304")


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError
    m.name(module, name)


def _constant(value: object) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(value)


def _byte(m: Machine) -> None:
    m.stack.append(m.data[m.at])
    m.at += 1


def _fixed(form: str) -> Callable[[Machine], None]:
    """Return a step that makes no calls, because such numbers are frequent."""
    packed = struct.Struct(form)
    unpack, size = packed.unpack_from, packed.size

    def step(m: Machine) -> None:
        m.stack.append(unpack(m.data, m.at)[0])
        m.at += size

    return step


def _recall_byte(m: Machine) -> None:
    place = m.data[m.at]
    m.at += 1
    m.recall(place)


def _short_text(m: Machine) -> None:
    start = m.at + 1
    stop = m.at = start + m.data[m.at]
    if stop > len(m.data):
        raise IndexError
    m.stack.append(m.data[start:stop].decode("utf-8", "surrogatepass"))


def _wide(width: int) -> Callable[[Machine], None]:
    def step(m: Machine) -> None:
        m.stack.append(int.from_bytes(m.take(m.number(width)), "little", signed=True))

    return step


def _bytes(width: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(width)))


def _text(width: int, encoding: str = "utf-8", errors: str = "surrogatepass") -> Any:
    return lambda m: m.stack.append(m.take(m.number(width)).decode(encoding, errors))


def _refused(what: str) -> Callable[[Machine], None]:
    def step(m: Machine) -> None:
        raise FormatError(f"a pickle {what}; refused", code="GC304")

    return step


def _unknown(m: Machine) -> None:
    m.at -= 1
    raise ValueError


_PERSISTENT = (
    "refers to objects outside of it, as those inside of torch.save's files do; read such "
    "a file with torch.load(..., weights_only=True)"
)
_OPCODES: dict[bytes, Callable[[Machine], None]] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"(": _mark,
    b"0": _pop,
    b"1": _pop_mark,
    b"2": _dup,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"I": _int,
    b"L": _long,
    b"F": lambda m: m.stack.append(float(m.line())),
    b"J": _fixed("<i"),
    b"K": _byte,
    b"M": _fixed("<H"),
    b"\x8a": _wide(1),
    b"\x8b": _wide(4),
    b"G": _fixed(">d"),
    b"S": _string,
    b"T": _text(4, "latin-1", "strict"),  # Python 2's bytes: text, as NumPy would have it
    b"U": _text(1, "latin-1", "strict"),
    b"V": lambda m: m.stack.append(m.line().decode("raw-unicode-escape")),
    b"X": _text(4),
    b"\x8c": _short_text,
    b"\x8d": _text(8),
    b"B": _bytes(4),
    b"C": _bytes(1),
    b"\x8e": _bytes(8),
    b"\x96": lambda m: m.stack.append(bytearray(m.take(m.number(8)))),
    b"]": lambda m: m.made([]),
    b"}": lambda m: m.made({}),
    b")": _constant(()),
    b"\x8f": lambda m: m.made(set()),
    b"l": _list,
    b"d": _dict,
    b"t": _tuple,
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"\x91": _frozenset,
    b"\x90": _add,
    b"a": _append,
    b"e": lambda m: _extend(m, m.marked()),
    b"s": _set_item,
    b"u": lambda m: m.put_in(m.marked()),
    b"p": lambda m: m.keep(int(m.line())),
    b"q": lambda m: m.keep(m.number(1)),
    b"r": lambda m: m.keep(m.number(4)),
    b"\x94": lambda m: m.keep(len(m.memo)),
    b"g": lambda m: m.recall(int(m.line())),
    b"h": _recall_byte,
    b"j": lambda m: m.recall(m.number(4)),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": Machine.call,
    b"b": Machine.build,
    b"i": _inst,
    **dict.fromkeys((b"o", b"\x81", b"\x92"), _refused("makes an object of a class")),
    **dict.fromkeys((b"\x82", b"\x83", b"\x84"), _refused("uses the registry of copyreg")),
    **dict.fromkeys((b"P", b"Q"), _refused(_PERSISTENT)),
    **dict.fromkeys((b"\x97", b"\x98"), _refused("needs buffers outside of it")),
}
OPCODES = [_OPCODES.get(bytes([code]), _unknown) for code in range(256)]


_STOP = ord(".")
_DAMAGED = (
    AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, struct.error,
)  # fmt: skip
_OTHER_KINDS = (
    (b"\x1f\x8b", "compressed by gzip: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by Zstandard: decompress it first"),
    (b"\x04\x22\x4d\x18", "compressed by LZ4: decompress it first"),
    (b"PK\x03\x04", "that is a zip archive, as torch.save and numpy.savez write them"),
    (b"\x93NUMPY", "that is an .npy file: use numpy.load"),
)


def interpret(data: bytes) -> object:
    """Return the value of a pickle, without recursion, because a pickle may nest to any depth."""
    machine, steps = Machine(data), OPCODES
    try:
        while (code := data[machine.at]) != _STOP:
            machine.at += 1
            steps[code](machine)
        found = machine.stack.pop()
    except FormatError:
        raise
    except _DAMAGED as error:
        raise _damaged_error(machine, error) from None
    if machine.unfinished:
        raise FormatError(
            "a pickle holds an array or dtype without its values; refused", code="GC304"
        )
    return found


def _damaged_error(machine: Machine, error: Exception) -> FormatError:
    data = machine.data
    seen = next((what for magic, what in _OTHER_KINDS if data.startswith(magic)), None)
    if seen:
        return FormatError(f"expected a pickle, found something {seen}", code="GC302")
    why = "it ends too early" if machine.at >= len(data) else type(error).__name__
    return FormatError(
        f"expected a pickle, found one that is damaged at byte {machine.at} of {len(data)} "
        f"({why}), or something else; it starts with {data[:12]!r}",
        code="GC302",
    )
