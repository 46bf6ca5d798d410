"""The bucket that the user named, as a place for the store suite."""

from __future__ import annotations

import os
import uuid
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.cloud.objects import open_objects

URL = "GROWCACHE_TEST_URL"  # where the user allows us to write
OPTIONS = "GROWCACHE_TEST_OPTIONS"  # source.storage_options, as YAML or JSON
PREFIX = "GROWCACHE_TEST_PREFIX"  # the URL of the one folder that a run writes to


def kind() -> str:
    """``own-s3`` and the like, if the tests run against the user's bucket; else an empty text."""
    scheme = urlsplit(os.environ.get(PREFIX, "")).scheme
    return f"own-{scheme}" if scheme else ""


def options() -> dict[str, Any]:
    """Return ``source.storage_options`` for the bucket; ValueError if the variable is no mapping."""
    found = yaml.safe_load(os.environ.get(OPTIONS) or "{}")
    if not isinstance(found, dict):
        raise ValueError(f"{OPTIONS}: expected a mapping such as {{profile: lab}}")
    return found


def new_folder() -> str:
    """Return the URL of an unused folder in the run's own."""
    return f"{os.environ[PREFIX]}{uuid.uuid4().hex[:8]}/"


def key_of(url: str) -> str:
    """Return what follows the bucket in a URL.

    >>> key_of("s3://bucket/a/b/")
    'a/b/'
    """
    return urlsplit(url).path.lstrip("/")


__all__ = [
    "OPTIONS",
    "PREFIX",
    "URL",
    "key_of",
    "kind",
    "new_folder",
    "open_objects",
    "options",
]
