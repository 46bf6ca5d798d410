"""What a source URL means: which store, which keys. Pure; knows no client."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from growcache.errors import ConfigError
from growcache.secrecy import public_query, without_userinfo

# Stores whose keys stand behind a bucket, container or host of their own.
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "http", "https"})
WEB = frozenset({"http", "https"})
SSH = frozenset({"sftp", "ssh"})
LOCAL = frozenset({"file", "local"})
_NO_USERS = frozenset({"s3", "s3a", "gs", "gcs"})  # what stands before an @ elsewhere is public

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)://")
_QUERY = re.compile(r"(https?://[^?]*)\?.*")
MAGIC = re.compile(r"[*?\[]")
# A "?" of a web address starts its query, so it is no wildcard there.
_WEB_MAGIC = re.compile(r"[*\[]")


@dataclass(frozen=True)
class Location:
    """One URL of a source, taken apart.

    Attributes:
        url: as typed, without user name and password.
        scheme: ``"file"`` for plain paths.
        bucket: bucket, container or host (of SSH without its user); empty where there is
            none.
        pattern: key, glob, or (ending with ``/``) the folder whose whole content is meant;
            of a signed web address without what signs it.
        userinfo: of a web address, ``user:password@``, for requests only.
        asked: what is requested for the key `pattern`, where that is signed.
    """

    url: str
    scheme: str
    bucket: str
    pattern: str
    userinfo: str = field(default="", repr=False)
    asked: str = field(default="", repr=False)

    @property
    def root(self) -> str:
        """What stands before a key in messages, as in ``s3://bucket/``."""
        if self.scheme in LOCAL:
            return ""
        if self.scheme in SSH:  # whose keys are absolute paths, as on this machine
            return f"{self.scheme}://{self.bucket}"
        return f"{self.scheme}://{self.bucket}/" if self.bucket else f"{self.scheme}://"

    @cached_property
    def is_glob(self) -> bool:
        """Whether the pattern has wildcards."""
        return bool(self._magic.search(self.pattern))

    @property
    def is_key(self) -> bool:
        """Whether the pattern is the key of a single object."""
        return not self.is_glob and bool(self.pattern) and not self.pattern.endswith("/")

    @property
    def prefix(self) -> str:
        """The deepest folder that holds every match: empty, or ending with ``/``."""
        found = self._magic.search(self.pattern)
        fixed = self.pattern[: found.start()] if found else self.pattern
        return fixed[: fixed.rfind("/") + 1]

    @property
    def depth(self) -> int | None:
        """How many levels below `prefix` a match lies at most; None: at any depth."""
        rest = self.pattern.removeprefix(self.prefix)
        return None if not rest or "**" in rest else rest.count("/") + 1

    @cached_property
    def matches(self) -> Callable[[str], bool]:
        """The test of a key.

        Raises:
            ConfigError: a malformed glob, in a chain of file systems.
        """
        if not self.is_glob:
            pattern = self.pattern
            return lambda key: (
                key == pattern or (pattern[-1:] in ("", "/") and key.startswith(pattern))
            )
        try:
            compiled = re.compile(translate_glob(self.pattern))
        except ValueError as error:
            raise ConfigError(f"source.url {self.url}: {error}") from None
        return lambda key: compiled.match(key) is not None

    @property
    def _magic(self) -> re.Pattern[str]:
        return _WEB_MAGIC if self.scheme in WEB else MAGIC


def parse_url(url: str) -> Location:
    """Return what a URL or path means.

    Raises:
        ConfigError: no bucket where the scheme needs one, a malformed glob, or a NUL byte.
    """
    shown = redact(url)
    if "\0" in url:
        raise ConfigError(
            f"source.url {shown!r}: expected an address or a path, found a NUL byte"
        )
    found = _SCHEME.match(url)
    if "::" in url:  # chained file systems keep the whole address, fsspec unravels it
        return Location(shown, "chain", "", url)
    if found is None or found[1].lower() in LOCAL:
        path = url[found.end() :] if found else url
        return _checked(Location(shown, "file", "", _absolute(path)))
    scheme, rest = found[1].lower(), url[found.end() :]
    if scheme not in BUCKETS | SSH:
        return _checked(Location(shown, scheme, "", rest))
    bucket, _, key = rest.partition("/")
    if scheme in SSH:
        host = bucket.rpartition("@")[2]
        _refuse_unquoted(host, shown)
        return _checked(Location(shown, scheme, host, "/" + key))
    userinfo = ""
    if scheme in WEB:
        user, at, bucket = bucket.rpartition("@")
        userinfo = user + at
        _refuse_unquoted(bucket, shown)
    elif scheme in _NO_USERS and (":" in bucket or "@" in bucket):
        raise ConfigError(
            f"source.url {scheme}://…: a bucket's name holds no : or @; credentials belong "
            "into source.storage_options, or the environment"
        )
    if not bucket or (scheme not in WEB and MAGIC.search(bucket)):
        raise ConfigError(f"source.url {shown}: expected {scheme}://BUCKET/KEY with one bucket")
    location = _checked(Location(shown, scheme, bucket, key, userinfo))
    return _unsigned(location) if scheme in WEB else location


def _refuse_unquoted(host: str, shown: str) -> None:
    """Refuse a host whose port is no number: it is a password with a slash in it."""
    port = host.rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
    if port and not port.isdigit():
        raise ConfigError(
            f"source.url {shown}: expected a host and the number of a port; a password's / and "
            "@ are written as %2F and %40"
        )


def _unsigned(location: Location) -> Location:
    """Return a web address whose pattern, which becomes a key that is kept, holds no secret."""
    path, _, query = location.pattern.partition("?")
    kept = public_query(query)
    if kept == query:
        return location
    return replace(location, pattern=f"{path}?{kept}" if kept else path, asked=location.pattern)


def redact(url: str) -> str:
    """Return the URL without user name and password, and without a query."""
    return "::".join(_QUERY.sub(r"\1?…", part) for part in without_userinfo(url).split("::"))


def translate_glob(pattern: str) -> str:
    """Return fsspec's meaning of a glob as a regular expression over whole keys.

    ``*`` and ``?`` stay inside a path component, ``**`` (a component of its own) spans
    any number of them, ``[...]`` is a set. Written out here because importing fsspec costs
    a sampler more than all its other imports together.

    Raises:
        ValueError: ``**`` beside other characters.

    >>> bool(re.match(translate_glob("a/**/*.npy"), "a/b/c/x.npy"))
    True
    >>> bool(re.match(translate_glob("a/*.npy"), "a/b/x.npy"))
    False
    """
    parts = pattern.split("/")
    out = []
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            out.append(".*" if last else "(?:.+/)?")
        elif "**" in part:
            raise ValueError("'**' must be a whole component, as in a/**/b")
        else:
            out.append(component_pattern(part) + ("" if last else "/"))
    return f"(?s:{''.join(out)})\\Z"


def component_pattern(part: str) -> str:
    """Return the regular expression of one component of a glob that is not ``**``."""
    return "[^/]+" if part == "*" else _component(part)


def _component(part: str) -> str:
    out, at = "", 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "[":
            close = part.find("]", at + (2 if part[at : at + 1] == "!" else 1))
            if close >= 0:
                out += _charset(part[at:close])
                at = close + 1
                continue
        out += {"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char)
    return out


def _charset(inside: str) -> str:
    negated = inside.startswith("!")
    body = inside[negated:]
    ranges = ""
    at = 0
    while at < len(body):
        if at + 2 < len(body) and body[at + 1] == "-":
            low, high = body[at], body[at + 2]
            at += 3
            if low <= high:  # an empty range matches nothing, as in the shell
                ranges += f"{re.escape(low)}-{re.escape(high)}"
        else:
            ranges += re.escape(body[at])
            at += 1
    if not ranges:
        return "[^/]" if negated else "(?!)"
    return f"(?!/)[{'^' if negated else ''}{ranges}]"


def _absolute(path: str) -> str:
    folder = path.endswith("/")
    absolute = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - globs are no paths
    return absolute + "/" if folder and absolute != "/" else absolute


def _checked(location: Location) -> Location:
    if location.is_glob:
        try:
            translate_glob(location.pattern)
        except ValueError as error:
            raise ConfigError(f"source.url {location.url}: {error}") from None
    return location
