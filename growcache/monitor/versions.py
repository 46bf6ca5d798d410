"""The installed versions of Python and of the libraries that a report or a diagnosis depends on."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("growcache", "numpy", "obstore", "fsspec", "torch", "tensorflow", "jax")
_OTHER_BUILDS = {"tensorflow": ("tensorflow-cpu", "tensorflow-rocm", "tf-nightly")}


def library_versions() -> dict[str, str]:
    """Return the version of Python and of each installed library."""
    found = {"Python": platform.python_version()}
    for library in LIBRARIES:
        for build in (library, *_OTHER_BUILDS.get(library, ())):
            with suppress(PackageNotFoundError):
                found.setdefault(library, version(build))
    return found
