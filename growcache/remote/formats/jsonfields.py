"""Which values of a JSON object make a sample: the option ``fields``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from growcache.errors import ConfigError, FormatError
from growcache.remote.formats.jsonvalues import AS, DTYPES, as_found
from growcache.remote.formats.named import names_and_more
from growcache.schema import Value

_SPEC = ("path", "dtype", "default")
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A field that the user named.

    Attributes:
        name: of the field.
        path: keys that lead to its value.
        dtype: one of `DTYPES`; None: as found.
        default: where there is no value, or null; `_MISSING`: none.
    """

    name: str
    path: tuple[str, ...]
    dtype: str | None
    default: Any = _MISSING

    def of(self, record: Mapping[str, Any]) -> Value:
        """Return its value in a record.

        Raises:
            FormatError: there is none, or it is not of the dtype.
        """
        found: Any = record
        for key in self.path:
            found = found.get(key, _MISSING) if isinstance(found, dict) else _MISSING
        empty = found is _MISSING or (found is None and self.dtype != "json")
        if empty and self.default is not _MISSING:
            found = self.default
        elif empty:
            what = "null" if found is None else "no such key"
            raise FormatError(
                f"expected a value for {'.'.join(self.path)!r}, found {what}; give it a default "
                "in source.options.fields"
            )
        try:
            return as_found(found) if self.dtype is None else AS[self.dtype](found)
        except (ValueError, OverflowError, TypeError) as error:
            raise FormatError(
                f"{'.'.join(self.path)}: expected {self.dtype or 'a value'}: {error}"
            ) from None


def wanted_fields(value: object) -> tuple[Wanted, ...] | None:
    """Return the fields that the option ``fields`` names; None: all that there are.

    Raises:
        ConfigError: it cannot be meant.
    """
    named = names_and_more("fields", value, "{x: float32, label: meta.label}")
    return None if named is None else tuple(_wanted(name, what) for name, what in named.items())


def _wanted(name: str, what: Any) -> Wanted:
    where = f"source.options.fields.{name}"
    if what is None:
        return Wanted(name, _path(name, where), None)
    if isinstance(what, str):
        if what in DTYPES:
            return Wanted(name, _path(name, where), what)
        if (close := _close(what, DTYPES)) is not None:
            raise ConfigError(
                f"{where}: no dtype {what!r}; did you mean {close}? (a key of this name is "
                f"{{path: {what}}})"
            )
        return Wanted(name, _path(what, where), None)
    if not isinstance(what, Mapping):
        raise ConfigError(
            f"{where}: expected a dtype, a path, or {{path: …, dtype: …, default: …}}, found "
            f"{what!r}"
        )
    for key in what:
        if key not in _SPEC:
            close = _close(str(key), _SPEC)
            hint = f"did you mean {close}?" if close else f"known are {', '.join(_SPEC)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    return _checked(Wanted(
        name, _path(what.get("path", name), where), what.get("dtype"),
        what.get("default", _MISSING),
    ), where)  # fmt: skip


def _checked(wanted: Wanted, where: str) -> Wanted:
    if wanted.dtype is not None and wanted.dtype not in DTYPES:
        close = _close(str(wanted.dtype), DTYPES)
        hint = f"did you mean {close}?" if close else f"known are {', '.join(DTYPES)}"
        raise ConfigError(f"{where}.dtype: unknown dtype {wanted.dtype!r}; {hint}")
    if wanted.default is not _MISSING:
        try:
            wanted.of({})
        except FormatError as error:
            raise ConfigError(f"{where}.default: {error}") from None
    return wanted


def _path(value: object, where: str) -> tuple[str, ...]:
    """Return the keys of ``a.b``, or of a list where keys have dots in them."""
    keys: Sequence[Any] = value.split(".") if isinstance(value, str) else value  # type: ignore[assignment]
    if isinstance(keys, list | tuple) and keys and all(isinstance(k, str) and k for k in keys):
        return tuple(keys)
    raise ConfigError(f"{where}: expected a path such as meta.label, found {value!r}")


def _close(word: str, known: Sequence[str]) -> str | None:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return found[0] if found else None
