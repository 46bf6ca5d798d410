"""Code that tables of labels and manifests share: JSON lines, and errors that name the setting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from growcache.errors import ConfigError, FormatError, StoreError
from growcache.store.urls import redact


def json_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number, from 1, and the object of each line that is not blank."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"line {number}: expected JSON, {error}") from None
        if not isinstance(row, dict):
            raise FormatError(f"line {number}: expected an object, found {line[:40]!r}")
        yield number, row


@contextmanager
def errors_of_setting(setting: str, url: str) -> Iterator[None]:
    """Name the setting in errors about its table, because a wrong table is the user's error."""
    try:
        yield
    except StoreError as error:
        named = type(error)(f"{setting}: {error}", code=error.code)
        named.exit_code = error.exit_code
        raise named from None
    except (ConfigError, FormatError) as error:
        raise ConfigError(f"{setting} {redact(url)}: {error}", code="GC219") from None
