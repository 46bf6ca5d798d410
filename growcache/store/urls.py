"""Parse source URLs: scheme, bucket, keys, globs and placeholders. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from growcache.config_source import PLACEHOLDER
from growcache.errors import ConfigError
from growcache.schema import is_utf8
from growcache.secrecy import query_without_secrets, without_userinfo

# Schemes whose keys follow a bucket, container or host.
BUCKET_SCHEMES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "http", "https"}
)
S3_SCHEMES = frozenset({"s3", "s3a"})
WEB_SCHEMES = frozenset({"http", "https"})
SSH_SCHEMES = frozenset({"sftp", "ssh"})
LOCAL_SCHEMES = frozenset({"file", "local"})
# With other schemes the text before an @ is not secret.
_SCHEMES_WITHOUT_USER = frozenset({"s3", "s3a", "gs", "gcs"})

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)://")
_QUERY = re.compile(r"(https?://[^?]*)\?.*")
WILDCARD = re.compile(r"[*?\[]")
# In a web address "?" starts the query, so it is not a wildcard.
_WEB_WILDCARD = re.compile(r"[*\[]")


@dataclass(frozen=True)
class Location:
    url: str  # as typed, without user name and password
    scheme: str  # "file" for plain paths
    bucket: str  # bucket, container or host (of SSH_SCHEMES without its user), or empty
    # Key, glob, or (ending with /) a folder with all of its content. Of a signed web address,
    # without the signature.
    pattern: str
    userinfo: str = field(default="", repr=False)  # of a web address, user:password@
    # The key that is requested instead of `pattern` if the address is signed.
    signed_key: str = field(default="", repr=False)

    @property
    def root(self) -> str:
        """The prefix of keys in messages, such as ``s3://bucket/``."""
        if self.scheme in LOCAL_SCHEMES:
            return ""
        if self.scheme in SSH_SCHEMES:  # their keys are absolute paths, as on this machine
            return f"{self.scheme}://{self.bucket}"
        return f"{self.scheme}://{self.bucket}/" if self.bucket else f"{self.scheme}://"

    @cached_property
    def is_glob(self) -> bool:
        return bool(self._wildcard.search(self.pattern))

    @property
    def is_key(self) -> bool:
        return not self.is_glob and bool(self.pattern) and not self.pattern.endswith("/")

    @property
    def prefix(self) -> str:
        """The deepest folder that has every match: empty, or ending with ``/``."""
        found = self._wildcard.search(self.pattern)
        fixed = self.pattern[: found.start()] if found else self.pattern
        return fixed[: fixed.rfind("/") + 1]

    @property
    def depth(self) -> int | None:
        """Largest number of levels of a match below `prefix`; None without a limit."""
        rest = self.pattern.removeprefix(self.prefix)
        return None if not rest or "**" in rest else rest.count("/") + 1

    @cached_property
    def matches(self) -> Callable[[str], bool]:
        """Return the test of a key.

        Raises:
            ConfigError: A glob in a chain of file systems is malformed.
        """
        if not self.is_glob:
            pattern = self.pattern
            return lambda key: (
                key == pattern or (pattern[-1:] in ("", "/") and key.startswith(pattern))
            )
        try:
            compiled = re.compile(translate_glob(self.pattern))
        except ValueError as error:
            raise ConfigError(f"source.url {self.url}: {error}", code="GC111") from None
        return lambda key: compiled.match(key) is not None

    @property
    def _wildcard(self) -> re.Pattern[str]:
        return _WEB_WILDCARD if self.scheme in WEB_SCHEMES else WILDCARD


def parse_url(url: str) -> Location:
    location = _parse_url(url)
    if location.is_glob and location.scheme != "chain":
        try:
            translate_glob(location.pattern)
        except ValueError as error:
            raise ConfigError(f"source.url {location.url}: {error}", code="GC111") from None
    return location


def _parse_url(url: str) -> Location:
    shown = redact(url)
    if "\0" in url:
        raise ConfigError(
            f"source.url {shown!r}: expected an address or a path, found a NUL byte",
            code="GC111",
        )
    found = _SCHEME.match(url)
    if "::" in url:  # chained file systems keep the whole address, which fsspec parses
        return Location(shown, "chain", "", url)
    if found is None or found[1].lower() in LOCAL_SCHEMES:
        path = url[found.end() :] if found else url
        return Location(shown, "file", "", _absolute_path(path))
    scheme, rest = found[1].lower(), url[found.end() :]
    if scheme not in BUCKET_SCHEMES | SSH_SCHEMES:
        return Location(shown, scheme, "", rest)
    bucket, _, key = rest.partition("/")
    if scheme in SSH_SCHEMES:
        host = bucket.rpartition("@")[2]
        _refuse_unquoted(host, shown)
        return Location(shown, scheme, host, "/" + key)
    userinfo = ""
    if scheme in WEB_SCHEMES:
        user, at, bucket = bucket.rpartition("@")
        userinfo = user + at
        _refuse_unquoted(bucket, shown)
    elif scheme in _SCHEMES_WITHOUT_USER and (":" in bucket or "@" in bucket):
        raise ConfigError(
            f"source.url {scheme}://…: a bucket's name cannot contain : or @; credentials "
            "belong in source.storage_options, or the environment",
            code="GC111",
        )
    if not bucket or (scheme not in WEB_SCHEMES and WILDCARD.search(bucket)):
        raise ConfigError(
            f"source.url {shown}: expected {scheme}://BUCKET/KEY with one bucket", code="GC111"
        )
    location = Location(shown, scheme, bucket, key, userinfo)
    return _without_signature(location) if scheme in WEB_SCHEMES else location


def _refuse_unquoted(host: str, shown: str) -> None:
    """Refuse a port that is not a number, because it is part of a password with an unquoted slash."""
    port = host.rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
    if port and not port.isdigit():
        raise ConfigError(
            f"source.url {shown}: expected a host and the number of a port; a password's / and "
            "@ are written as %2F and %40",
            code="GC111",
        )


def _without_signature(location: Location) -> Location:
    """Return a web address without secrets in its pattern, because keys are stored."""
    path, _, query = location.pattern.partition("?")
    kept = query_without_secrets(query)
    if kept == query:
        return location
    return replace(
        location, pattern=f"{path}?{kept}" if kept else path, signed_key=location.pattern
    )


def redact(url: str) -> str:
    """Return the URL without user name, password and query."""
    return "::".join(_QUERY.sub(r"\1?…", part) for part in without_userinfo(url).split("::"))


def translate_glob(pattern: str) -> str:
    """Return a glob, as fsspec defines it, as a regular expression for whole keys.

    fsspec is not used, because importing it costs a sampler more than all its other imports
    together.

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
            out.append(component_regex(part) + ("" if last else "/"))
    return f"(?s:{''.join(out)})\\Z"


def component_regex(part: str) -> str:
    if part == "*":
        return "[^/]+"
    out, at = "", 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "[":
            close = part.find("]", at + (2 if part[at : at + 1] == "!" else 1))
            if close >= 0:
                out += _charset_regex(part[at:close])
                at = close + 1
                continue
        out += {"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char)
    return out


def _charset_regex(inside: str) -> str:
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


def _absolute_path(path: str) -> str:
    folder = path.endswith("/")
    absolute = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - globs are no paths
    return absolute + "/" if folder and absolute != "/" else absolute


@dataclass(frozen=True)
class UrlTemplate:
    """A URL such as ``s3://b/train_x_{k}.npy``.

    A placeholder is a part of a name, and is the same wherever it occurs. So a key and the
    values of all placeholders determine each other.
    """

    folder: str
    rest: str
    names: tuple[str, ...]
    pattern: re.Pattern[str]

    @classmethod
    def from_url(cls, url: str) -> UrlTemplate:
        first = PLACEHOLDER.search(url)
        assert first is not None
        at = url.rfind("/", 0, first.start()) + 1
        rest = url[at:]
        names = tuple(sorted(set(PLACEHOLDER.findall(url))))
        return cls(
            url[:at], rest, names, re.compile(rf"(?s:(?:.*/)?{_template_regex(rest)})\Z")
        )

    @property
    def literal_characters(self) -> int:
        """Number of fixed characters of a key.

        If two templates match, the one with more wins.
        """
        return len(PLACEHOLDER.sub("", self.rest))

    def values(self, key: str) -> tuple[str, ...] | None:
        match = self.pattern.match(key)
        return None if match is None else tuple(match[name] for name in self.names)

    def render(self, values: tuple[str, ...]) -> str:
        named: Mapping[str, str] = dict(zip(self.names, values, strict=True))
        return PLACEHOLDER.sub(lambda found: named[found[1]], self.rest)


def _template_regex(rest: str) -> str:
    out, at, seen = "", 0, set()
    for found in PLACEHOLDER.finditer(rest):
        name = found[1]
        again = f"(?P={name})" if name in seen else f"(?P<{name}>[^/]+)"
        out += re.escape(rest[at : found.start()]) + again
        at = found.end()
        seen.add(name)
    return out + re.escape(rest[at:])


_UNSUPPORTED_COMPONENTS = frozenset({"", ".", ".."})
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


def is_unsupported_key(key: str) -> bool:
    """Whether obstore rejects the key as a path.

    >>> is_unsupported_key("a//b"), is_unsupported_key("a/../b"), is_unsupported_key("a/..b/%2F#?.npy")
    (True, True, False)
    """
    if not _UNSUPPORTED_COMPONENTS.isdisjoint(key.split("/")):
        return True
    return not key.isprintable() and _CONTROL_CHARACTER.search(key) is not None


_AFTER_SLASH = chr(ord("/") + 1)
_LAST_CHARACTER = "~"  # sorts after the first characters of ASCII names


@dataclass(frozen=True, slots=True)
class _GlobComponent:
    head: str  # prefix of all matches
    exact: bool
    any_depth: bool
    matches: Callable[[str], object]


class MatchSeeker:
    def __init__(self, pattern: str, *, is_glob: bool) -> None:
        found = WILDCARD.search(pattern) if is_glob else None
        self.fixed = pattern[: found.start()] if found else pattern
        self._levels = [_glob_component(part) for part in pattern.split("/")] if is_glob else []

    def seek(self, key: str) -> str | None:
        """Return a bound below which no key from ``key`` on matches, or None if no match follows.

        >>> seeker = MatchSeeker("a/*/b_*.npy", is_glob=True)
        >>> seeker.seek(""), seeker.seek("a/x/a_1"), seeker.seek("a/x/c"), seeker.seek("b")
        ('a/', 'a/x/b_', 'a/x0', None)
        """
        if not key.startswith(self.fixed):
            return max(key, self.fixed) if key < self.fixed else None
        base, rest = "", key
        for number, level in enumerate(self._levels):
            last = number == len(self._levels) - 1
            if level.any_depth:
                return key
            need = level.head + ("/" if level.exact and not last else "")
            if rest <= need:
                return base + need
            if not rest.startswith(need) or (level.exact and last):
                return self._seek_past(base)
            name, slash, deeper = rest.partition("/")
            if not slash:
                return key
            if last or not level.matches(name):
                return self._seek_past(f"{base}{name}/")
            base, rest = f"{base}{name}/", deeper
        return key

    def _seek_past(self, folder: str) -> str | None:
        return self.seek(folder[:-1] + _AFTER_SLASH) if folder else None


def _glob_component(part: str) -> _GlobComponent:
    found = WILDCARD.search(part)
    head = part[: found.start()] if found else part
    if part == "**":
        return _GlobComponent("", exact=False, any_depth=True, matches=bool)
    matches = re.compile(component_regex(part)).fullmatch
    return _GlobComponent(head, exact=found is None, any_depth=False, matches=matches)


def key_before(key: str) -> str | None:
    """Return a name shortly before a key, from which to list; None means the start.

    >>> key_before("a/x0"), key_before("a/x/b_"), key_before("a/ "), key_before("a/")
    ('a/x/~', 'a/x/b^~', 'a', 'a')
    """
    if not key or key.endswith("/"):
        return key[:-1] or None
    before = key[:-1] + chr(max(0, ord(key[-1]) - 1)) + _LAST_CHARACTER
    if is_unsupported_key(before) or not is_utf8(before):
        before = key[:-1].rpartition("/")[0]
    return before or None
