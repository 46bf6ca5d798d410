"""The table of object formats, and functions that open the format of a source.

Each module is imported when a source needs it, so a sampler imports only the formats that it
reads. docs/reference/formats.md describes the options.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

from growcache.config_source import AUTO, SourceConfig
from growcache.errors import ConfigError
from growcache.formats.base import ObjectFormat

FORMATS: dict[str, str] = {
    "audio": "audio",
    "bytes": "raw",
    "dicom": "dicom",
    "edf": "edf",
    "fits": "fits",
    "hdf5": "hdf5",
    "image": "image",
    "jsonl": "jsonl",
    "lmdb": "lmdb",
    "nifti": "nifti",
    "npy": "npy",
    "npz": "npz",
    "parquet": "parquet",
    "raw": "raw",
    "tar": "tar",
    "tfrecord": "tfrecord",
    "tiff": "tiff",
    "zarr": "zarr",
}
COMPRESSIBLE = ("jsonl", "nifti", "tar", "tfrecord")  # formats with the option compression
# Formats whose option decode can name user code.
_DECODABLE = ("bytes", "lmdb", "tar", "tfrecord")


def open_format(
    name: str, options: Mapping[str, Any], urls: Sequence[str] = ()
) -> ObjectFormat:
    """Return a format by its name. The endings of ``urls`` may name a compression.

    Raises:
        ConfigError: The name is unknown, or an option is not valid.
    """
    if is_user_format(name):
        from growcache.formats.user import open_user

        return open_user(name, options)
    if name not in FORMATS:
        raise ConfigError(
            f"source.format: unknown format {name!r}; {_hint(name)}", code="GC102"
        )
    if name in COMPRESSIBLE:
        return _open_compressible(name, options, urls)
    make = _maker(name)
    return make(options, urls) if name == "audio" else make(options)


def _maker(name: str) -> Callable[..., ObjectFormat]:
    module = import_module(f"growcache.formats.{FORMATS[name]}")
    return cast("Callable[..., ObjectFormat]", getattr(module, f"open_{name}"))


def _open_compressible(
    name: str, options: Mapping[str, Any], urls: Sequence[str]
) -> ObjectFormat:
    from growcache.formats.compressed import INFERRED, compression_option

    make, compression = _maker(name), compression_option(options, urls)
    if compression != INFERRED:
        return make({**options, "compression": compression})
    plain = make({**options, "compression": "none"})
    whole = make({**options, "compression": INFERRED})
    if not plain.ranged:
        return whole
    from growcache.formats.per_object import CompressedFormat, PerObjectFormat

    return PerObjectFormat(plain, cast("CompressedFormat", whole))


def names_decide(source: SourceConfig) -> bool:
    """Whether an object's name tells that it is compressed and therefore read whole."""
    if source.format not in COMPRESSIBLE or source.fields or source.dataset is not None:
        return False
    from growcache.formats.compressed import INFERRED, compression_option

    return compression_option(source.options, source.url) == INFERRED


def _hint(name: str) -> str:
    close = sorted(difflib.get_close_matches(name, FORMATS, n=2))
    known = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"known are {', '.join(sorted(FORMATS))}"
    )
    return f"{known} (or package.module:function)"


def open_source(source: SourceConfig) -> ObjectFormat:
    if source.dataset is not None:
        from growcache.formats.dataset import open_dataset

        return open_dataset(source)
    if not source.fields:
        return open_format(source.format, source.options, source.url)
    from growcache.formats.joined_fields import JoinedFormat

    _refuse_alone(source)
    formats = {
        name: open_format(*source.format_of(name), (field.url,))
        for name, field in source.fields.items()
    }
    return JoinedFormat(formats)


def _refuse_alone(source: SourceConfig) -> None:
    from growcache.formats.joined_fields import NOT_JOINABLE

    for name in source.fields:
        form, options = source.format_of(name)
        if form in NOT_JOINABLE:
            raise ConfigError(
                f"source.fields.{name}: objects of format {form} {NOT_JOINABLE[form]}",
                code="GC103",
            )
        if form == "image" and options.get("classes") == AUTO:
            raise ConfigError(
                f"source.fields.{name}: name the classes; auto is for images alone",
                code="GC103",
            )


def is_user_format(name: str) -> bool:
    return ":" in name


def check_source(source: SourceConfig) -> None:
    """Refuse a wrong format or option, as far as no user code has to run for that."""
    if not any(_runs_user_code(*one) for one in source.formats):
        open_source(source)


def check_format(name: str, options: Mapping[str, Any], urls: Sequence[str] = ()) -> None:
    if not _runs_user_code(name, options):
        open_format(name, options, urls)


def _runs_user_code(name: str, options: Mapping[str, Any]) -> bool:
    return is_user_format(name) or (
        name in _DECODABLE and ":" in str(options.get("decode") or "")
    )
