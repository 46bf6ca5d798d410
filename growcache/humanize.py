"""Numbers, sizes, durations and long names in a form for people."""

from __future__ import annotations

import re
from pathlib import Path

from growcache.cache.files import directory_of, generation_in, generation_paths

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_OBJECT_NAME = re.compile(r"[^\s(]*/.*?(?=: )")  # a URL or key, before a reason
MIN_NAME_CHARACTERS = 16


def in_bytes(number: float) -> str:
    """Return bytes in decimal units, with three digits.

    >>> in_bytes(0), in_bytes(999), in_bytes(1000), in_bytes(6_240_000_000)
    ('0 B', '999 B', '1.00 kB', '6.24 GB')
    """
    value = max(0.0, float(number))
    for unit in _BYTE_UNITS:
        if value < 999.5 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def as_size(number: int) -> str:
    """Return bytes in the notation of a configuration.

    >>> as_size(50_000_000_000), as_size(2_000_000)
    ('50GB', '2MB')
    """
    return in_bytes(number).replace(" ", "").replace(".00", "").replace(".0", "")


def in_count(number: float) -> str:
    """Return a count, exact below a million and rounded above.

    >>> in_count(31004), in_count(1_234_567), in_count(2.5e9)
    ('31,004', '1.23 million', '2.50 billion')
    """
    if number < 1e6:
        return f"{number:,.0f}"
    if number < 999.5e6:
        return f"{_three_digits(number / 1e6)} million"
    return f"{_three_digits(number / 1e9)} billion"


def in_time(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> in_time(0.4), in_time(59.7), in_time(133), in_time(7300), in_time(200_000)
    ('0 s', '60 s', '2 min 13 s', '2 h 1 min', '2 d 7 h')
    """
    whole = round(max(0.0, seconds))
    if whole <= 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def in_percent(share: float) -> str:
    """Return a share of 1 in percent, with more digits if it is small.

    >>> in_percent(0), in_percent(0.00042), in_percent(0.031), in_percent(0.5), in_percent(1)
    ('0 %', '0.04 %', '3.1 %', '50 %', '100 %')
    """
    percent = 100 * share
    if percent == 0 or percent >= 10:
        # 99.97 % must not read as everything.
        return f"{min(percent, 99) if percent < 100 else percent:.0f} %"
    return f"{percent:.1f} %" if percent >= 1 else f"{percent:.2f} %"


def plural(number: float, one: str, many: str | None = None) -> str:
    """Return the count with its noun.

    >>> plural(1, "shard"), plural(1200, "shard"), plural(2, "part was", "parts were")
    ('1 shard', '1,200 shards', '2 parts were')
    """
    return f"{in_count(number)} {one if number == 1 else many or one + 's'}"


def shorten_name(text: str, length: int) -> str:
    """Shorten a text to ``length`` characters, first by the folders of the object that it names.

    >>> shorten_name("s3://bucket/a/long/way/to/7.npy: 503 SlowDown", 32)
    '…long/way/to/7.npy: 503 SlowDown'
    >>> shorten_name("no object is named here", 12)
    'no object i…'
    """
    if len(text) <= length:
        return text
    named = _OBJECT_NAME.search(text)
    if named:
        kept = max(MIN_NAME_CHARACTERS, len(named[0]) - (len(text) - length))
        if kept < len(named[0]):
            text = f"{text[: named.start()]}…{named[0][-kept + 1 :]}{text[named.end() :]}"
    return text if len(text) <= length else f"{text[: max(0, length - 1)]}…"


def keep_end(text: str, length: int) -> str:
    """Shorten a text to ``length`` characters, keeping its end.

    >>> keep_end("/a/long/way/cache", 9)
    '…ay/cache'
    """
    return text if len(text) <= length else f"…{text[len(text) - length + 1 :]}"


def _three_digits(value: float) -> str:
    return (
        f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
    )


def generation_note(root: Path) -> str:
    """Return which generation of several is shown, and where the others are.

    The text is empty if there is one generation.
    """
    others = [str(path) for path in generation_paths(directory_of(root)) if path != root]
    shown = f" This is generation {generation_in(root)}; another one is {', '.join(others)}."
    return shown if others else ""
