"""What an object can hold: one file per format, each an entry of `FORMATS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from growcache.errors import ConfigError
from growcache.remote.formats.npy import open_npy
from growcache.remote.formats.objects import Measure, ObjectFormat, Reader, Visit
from growcache.remote.formats.raw import open_raw

__all__ = ["FORMATS", "Measure", "ObjectFormat", "Reader", "Visit", "open_format"]

FORMATS: dict[str, Callable[[Mapping[str, Any]], ObjectFormat]] = {
    "npy": open_npy,
    "raw": open_raw,
}


def open_format(name: str, options: Mapping[str, Any]) -> ObjectFormat:
    """Return the format of a source's objects.

    Args:
        name: a key of `FORMATS`.
        options: those of the format.

    Raises:
        ConfigError: no such format or option, or a value that cannot be meant.
    """
    if name in FORMATS:
        return FORMATS[name](options)
    if ":" in name:
        raise ConfigError(f"source.format {name}: formats of your own are not in this version")
    close = difflib.get_close_matches(name, FORMATS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(FORMATS))}"
    raise ConfigError(f"source.format: unknown format {name!r}; {hint}")
