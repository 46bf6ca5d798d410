"""The table of object formats, and how the format of a source is opened.

Each entry of `FORMATS` names a module and a function of it. The module is imported when a
source needs it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growcache.config import SourceConfig
from growcache.errors import ConfigError
from growcache.formats.base import ObjectFormat
from growcache.formats.compressed import compression_option
from growcache.formats.hdf5 import open_hdf5
from growcache.formats.image import open_image
from growcache.formats.join import NOT_JOINABLE, JoinedFormat
from growcache.formats.jsonl import open_jsonl
from growcache.formats.lmdb import open_lmdb
from growcache.formats.npy import open_npy
from growcache.formats.npz import open_npz
from growcache.formats.parquet import open_parquet
from growcache.formats.raw import open_bytes, open_raw
from growcache.formats.tar import open_tar
from growcache.formats.tfrecord import open_tfrecord
from growcache.formats.user import open_user
from growcache.formats.zarr import open_zarr

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
_WITH_DECODE_OPTION = (
    "bytes",
    "lmdb",
    "tar",
    "tfrecord",
)  # whose option decode names code of the user's

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
            options = {**options, "compression": compression_option(options, urls)}
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
    return JoinedFormat(formats)


def _refuse_alone(source: SourceConfig) -> None:
    for name in source.fields:
        form, _ = source.format_of(name)
        if form in NOT_JOINABLE:
            raise ConfigError(
                f"source.fields.{name}: objects of format {form} {NOT_JOINABLE[form]}"
            )


def is_user_format(name: str) -> bool:
    """Whether a format's name is that of code of the user's."""
    return ":" in name


def check_source(source: SourceConfig) -> None:
    """Refuse what can be seen to be wrong without running any code of the user's.

    Raises:
        ConfigError: as `open_source` does.
    """
    if not any(_runs_user_code(*one) for one in source.formats):
        open_source(source)


def check_format(name: str, options: Mapping[str, Any], urls: Sequence[str] = ()) -> None:
    """Refuse what can be seen to be wrong without running any code of the user's.

    Raises:
        ConfigError: as `open_format` does.
    """
    if not _runs_user_code(name, options):
        open_format(name, options, urls)


def _runs_user_code(name: str, options: Mapping[str, Any]) -> bool:
    return is_user_format(name) or (
        name in _WITH_DECODE_OPTION and ":" in str(options.get("decode") or "")
    )
