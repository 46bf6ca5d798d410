"""Credentials: find them in a configuration, and keep them out of messages and files.

Secrets are recognized by the names of their settings and by their place in a URL. Messages hide
them, and files have hashes in their place.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "HIDDEN"

MIN_SECRET_CHARACTERS = 6  # shorter texts are hardly secrets, and occur in sentences
ANYWHERE_SECRET_CHARACTERS = 8  # shorter secrets are hidden only as whole words
# A text this long under an unknown name of storage_options is secret.
UNNAMED_SECRET_CHARACTERS = 12

_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_SECRET_WORDS = frozenset(
    {"key", "secret", "token", "password", "passwd", "passphrase", "pwd", "credential",
     "credentials", "sig", "signature", "sas", "auth", "authorization", "cookie", "headers",
     "pkey", "jwt"}
)  # fmt: skip
_SECRET_ENDS = ("key", "token", "secret", "password", "signature", "credentials")
_COMMON_WORDS = frozenset(
    {"anon", "browser", "cache", "cloud", "google_default", "none", "true"} | _SECRET_WORDS
)
# These are secret in storage_options.
_PUBLIC_OUTSIDE_STORAGE_OPTIONS = frozenset({"key", "keys", "headers"})
_PUBLIC_NAMES = frozenset(
    {"endpoint_url", "endpoint", "base_url", "host", "port", "region", "region_name",
     "account_name", "project", "profile", "verify", "key_filename", "cache_storage", "path"}
)  # fmt: skip

# Parameters that change when a URL is signed again, although it names the same object.
_SIGNED_PARAMETERS = re.compile(
    r"x-(amz|goog|oss|ms)-.*|sv|ss|srt|sr|sp|se|st|spr|sip|sdd|sk(oid|tid|t|e|s|v)"
    r"|expires|policy|awsaccesskeyid|googleaccessid|key-pair-id",
    re.IGNORECASE,
)
_SIGNATURES = frozenset({"x-amz-signature", "x-goog-signature", "sig", "signature"})

_USERINFO = re.compile(r"(?<=://)[^/?#\s]*@")
# A password with an unquoted "/" or "@". Digits only would be a port.
_UNQUOTED_USERINFO = re.compile(r"(?<=://)[^/?#\s:@]*:(?!\d+(?:[/?#]|$))\S*@")


def is_secret(name: str) -> bool:
    """Whether the value of a setting with this name may be a secret.

    >>> [is_secret(n) for n in ("secret", "AWSAccessKeyId", "sas_token", "monkeys", "design")]
    [True, True, True, False, False]
    """
    words = {word.lower() for word in _WORDS.findall(name)}
    return bool(words & _SECRET_WORDS) or name.lower().endswith(_SECRET_ENDS)


def without_userinfo(url: str) -> str:
    """Return a URL, or a chain of them, without user names and passwords."""
    return "::".join(
        _UNQUOTED_USERINFO.sub("", _USERINFO.sub("", part)) for part in url.split("::")
    )


def query_without_secrets(query: str) -> str:
    """Return the parameters that belong to the object, without those that authorize the request.

    >>> query_without_secrets("v=1&X-Amz-Date=2&X-Amz-Signature=3")
    'v=1'
    """
    pairs = [(pair.partition("=")[0], pair) for pair in query.split("&")]
    signed = any(name.lower() in _SIGNATURES for name, _ in pairs)
    return "&".join(
        pair
        for name, pair in pairs
        if not (is_secret(unquote(name)) or (signed and _SIGNED_PARAMETERS.fullmatch(name)))
    )


def url_without_secrets(url: str) -> str:
    """Return a URL without credentials: users, passwords, tokens and signatures.

    >>> url_without_secrets("https://me:word@host/a?v=1&token=x"), url_without_secrets("s3://b/run?.npy")
    ('https://host/a?v=1', 's3://b/run?.npy')
    """
    if "://" not in url:
        return url
    return "::".join(map(_address_without_secrets, without_userinfo(url).split("::")))


def _address_without_secrets(url: str) -> str:
    address, mark, query = url.partition("?")
    if not mark or "=" not in query:
        return url
    kept = query_without_secrets(query)
    return f"{address}?{kept}" if kept else address


def hash_secrets(value: Any) -> Any:
    """Return a JSON value with hashes in place of secrets."""
    if isinstance(value, Mapping):
        return {
            name: _hash_secret(inner)
            if isinstance(inner, str) and _is_secret_setting(str(name), stored=False)
            else hash_secrets(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [hash_secrets(inner) for inner in value]
    return url_without_secrets(value) if isinstance(value, str) else value


@functools.lru_cache(maxsize=64)
def _hash_secret(secret: str) -> str:
    # A slow hash, because an attacker may guess passwords.
    digest = hashlib.scrypt(secret.encode(), salt=b"growcache", n=1 << 12, r=8, p=1, dklen=8)
    return f"{HIDDEN}-{digest.hex()}"


def _is_secret_setting(name: str, *, stored: bool) -> bool:
    if name.lower() in (
        _PUBLIC_NAMES if stored else _PUBLIC_NAMES | _PUBLIC_OUTSIDE_STORAGE_OPTIONS
    ):
        return False
    return is_secret(name)


def secret_settings(values: object, within: str = "", *, stored: bool = False) -> Iterator[str]:
    """Yield the dotted names of the settings that hold a secret.

    >>> list(secret_settings({"url": "s3://b", "storage_options": {"secret": "9mmFyp+4", "anon": "no"}}))
    ['storage_options.secret']
    >>> list(secret_settings({"url": ["https://me:9mmFyp+4@host/a"]}))
    ['url.0']
    """
    if isinstance(values, Mapping):
        pairs = [(str(name), value) for name, value in values.items()]
    elif isinstance(values, list | tuple):
        pairs = [(str(number), value) for number, value in enumerate(values)]
    else:
        return
    for name, value in pairs:
        where = f"{within}.{name}" if within else name
        is_secret_setting = _is_secret_setting(name, stored=stored)
        if isinstance(value, str) or is_secret_setting:
            texts = _texts_within(value) if is_secret_setting else _secrets_of_url(value)
            if any(_may_be_secret(text) for text in texts):
                yield where
        else:
            inner = stored or name == "storage_options"
            yield from secret_settings(value, where, stored=inner)


def _may_be_secret(text: str) -> bool:
    return len(text) >= MIN_SECRET_CHARACTERS and text not in _COMMON_WORDS


# ------------------------------------------------------------------------- known secrets

_lock = threading.Lock()
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None


def remember_secrets(values: object) -> None:
    """Hide the secrets of a configuration in all further messages."""
    global _pattern
    found = set(filter(_may_be_secret, _secrets_within(values)))
    with _lock:
        if found <= _known:
            return
        _known.update(found)
        longest_first = sorted(_known, key=lambda text: (-len(text), text))
        _pattern = re.compile("|".join(map(_secret_pattern, longest_first)))


def hide_secrets(text: str) -> str:
    """Return a message with the known secrets hidden."""
    return text if _pattern is None else _pattern.sub(HIDDEN, text)


def _secret_pattern(secret: str) -> str:
    if len(secret) >= ANYWHERE_SECRET_CHARACTERS:
        return re.escape(secret)
    return rf"(?<!\w){re.escape(secret)}(?!\w)"


def _secrets_within(values: object, *, stored: bool = False) -> Iterator[str]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            if name == "fields" and isinstance(value, Mapping) and not stored:
                for field in value.values():  # the user chose these names
                    yield from _secrets_within(field)
            elif _is_secret_setting(str(name), stored=stored):
                yield from _texts_within(value)
            elif stored and str(name) not in _PUBLIC_NAMES and isinstance(value, str):
                yield from _secrets_of_url(value)
                yield from (t for t in _spellings(value) if len(t) >= UNNAMED_SECRET_CHARACTERS)
            elif stored and isinstance(value, str):  # an endpoint may lack its scheme
                yield from _secrets_of_url(value if "://" in value else f"://{value}")
            else:
                yield from _secrets_within(value, stored=stored or name == "storage_options")
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _secrets_within(value, stored=stored)
    elif isinstance(values, str):
        yield from _secrets_of_url(values)


def _texts_within(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts_within(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts_within(inner)
    elif isinstance(value, str):
        yield from _spellings(value)
        # As in "Bearer …", or in a connection string.
        parts = [part.partition("=")[2] or part for part in re.split(r"[\s;,]", value)]
        yield from (part for part in parts if len(part) >= UNNAMED_SECRET_CHARACTERS)


def _secrets_of_url(url: str) -> Iterator[str]:
    if "://" not in url:
        return
    for part in url.split("::"):
        for expression in (_USERINFO, _UNQUOTED_USERINFO):
            for found in expression.finditer(part):
                user, _, password = found[0][:-1].partition(":")
                yield from _spellings(password or user)
        for pair in part.partition("?")[2].split("&"):
            name, _, value = pair.partition("=")
            if is_secret(unquote(name)):
                yield from _spellings(value)


def _spellings(text: str) -> set[str]:
    return {text, unquote(text), quote(text, safe=""), quote(text), repr(text)[1:-1]}
