"""What an object can hold: one file per format, each an entry of `FORMATS`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growcache.config import SourceConfig
from growcache.errors import ConfigError
from growcache.remote.formats.blob import open_bytes
from growcache.remote.formats.compressed import compression
from growcache.remote.formats.fields import ALONE, JoinedFields
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
from growcache.remote.formats.tar import open_tar
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
    "check_source",
    "endless_entry",
    "is_user_format",
    "open_format",
    "open_source",
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
    "tar": open_tar,
    "tfrecord": open_tfrecord,
    "zarr": open_zarr,
}
_DECODED = ("bytes", "lmdb", "tar", "tfrecord")  # whose option decode names code of the user's

# Formats that take a word for how objects are compressed, of which their names may tell.
COMPRESSIBLE = ("jsonl", "tar", "tfrecord")


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


def open_source(source: SourceConfig) -> ObjectFormat:
    """Return the format of a source's objects, of several fields or not.

    Raises:
        ConfigError: as `open_format` does, or the fields' formats do not go together.
    """
    if not source.fields:
        return open_format(source.format, source.options, source.url)
    _refuse_alone(source)
    formats = {
        name: open_format(*source.format_of(name), (field.url,))
        for name, field in source.fields.items()
    }
    return JoinedFields(formats)


def _refuse_alone(source: SourceConfig) -> None:
    for name in source.fields:
        form, _ = source.format_of(name)
        if form in ALONE:
            raise ConfigError(f"source.fields.{name}: objects of format {form} {ALONE[form]}")


def is_user_format(name: str) -> bool:
    """Whether a format's name is that of code of the user's."""
    return ":" in name


def check_source(source: SourceConfig) -> None:
    """Refuse what can be seen to be wrong without running any code of the user's.

    Raises:
        ConfigError: as `open_source` does.
    """
    if not any(_runs_code(*one) for one in source.formats):
        open_source(source)


def check_format(name: str, options: Mapping[str, Any], urls: Sequence[str] = ()) -> None:
    """Refuse what can be seen to be wrong without running any code of the user's.

    Raises:
        ConfigError: as `open_format` does.
    """
    if not _runs_code(name, options):
        open_format(name, options, urls)


def _runs_code(name: str, options: Mapping[str, Any]) -> bool:
    return is_user_format(name) or (
        name in _DECODED and ":" in str(options.get("decode") or "")
    )
