"""What an object can hold: one file per format, each an entry of `FORMATS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growcache.errors import ConfigError
from growcache.remote.formats.blob import open_bytes
from growcache.remote.formats.compressed import compression
from growcache.remote.formats.hdf5 import open_hdf5
from growcache.remote.formats.image import open_image
from growcache.remote.formats.jsonl import open_jsonl
from growcache.remote.formats.lmdb import open_lmdb
from growcache.remote.formats.npy import open_npy
from growcache.remote.formats.npz import open_npz
from growcache.remote.formats.objects import (
    Measure,
    ObjectFormat,
    Reader,
    Visit,
    read_found,
)
from growcache.remote.formats.parquet import open_parquet
from growcache.remote.formats.raw import open_raw
from growcache.remote.formats.tfrecord import open_tfrecord
from growcache.remote.formats.user import endless_entry, open_user
from growcache.remote.formats.zarr import open_zarr

__all__ = [
    "FORMATS",
    "Measure",
    "ObjectFormat",
    "Reader",
    "Visit",
    "check_format",
    "endless_entry",
    "is_user_format",
    "open_format",
    "read_found",
]

FORMATS: dict[str, Callable[[Mapping[str, Any]], ObjectFormat]] = {
    "bytes": open_bytes,
    "hdf5": open_hdf5,
    "image": open_image,
    "jsonl": open_jsonl,
    "lmdb": open_lmdb,
    "npy": open_npy,
    "npz": open_npz,
    "parquet": open_parquet,
    "raw": open_raw,
    "tfrecord": open_tfrecord,
    "zarr": open_zarr,
}
_DECODED = ("bytes", "lmdb", "tfrecord")  # whose option decode names code of the user's

# Formats that take a word for how objects are compressed, of which their names may tell.
COMPRESSIBLE = ("jsonl", "tfrecord")


def open_format(
    name: str, options: Mapping[str, Any], urls: Sequence[str] = ()
) -> ObjectFormat:
    """Return the format of a source's objects.

    Args:
        name: a key of `FORMATS`, or ``package.module:function`` of the user's own.
        options: those of the format.
        urls: of the source.

    Raises:
        ConfigError: no such format or option, or a value that cannot be meant.
    """
    if name in FORMATS:
        if name in COMPRESSIBLE:
            options = {**options, "compression": compression(options, urls)}
        return FORMATS[name](options)
    if is_user_format(name):
        return open_user(name, options)
    close = sorted(difflib.get_close_matches(name, FORMATS, n=2))
    hint = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"known are {', '.join(sorted(FORMATS))}"
    )
    raise ConfigError(
        f"source.format: unknown format {name!r}; {hint} (or package.module:function)"
    )


def is_user_format(name: str) -> bool:
    """Whether a format's name is that of code of the user's."""
    return ":" in name


def check_format(name: str, options: Mapping[str, Any], urls: Sequence[str] = ()) -> None:
    """Refuse what can be seen to be wrong without running any code of the user's.

    Raises:
        ConfigError: as `open_format` does.
    """
    runs_code = is_user_format(name) or (
        name in _DECODED and ":" in str(options.get("decode") or "")
    )
    if not runs_code:
        open_format(name, options, urls)
