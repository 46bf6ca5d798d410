"""The versions of libraries that decide what is in a shard: the same on every machine, or the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

# Decoders, and what makes arrays of what they decode.
LIBRARIES = (
    *("growcache", "numpy", "h5py", "numcodecs", "pillow", "pyarrow", "zstandard", "nibabel"),
    *("soundfile", "astropy", "tifffile", "imagecodecs", "pydicom", "scipy"),
)


def installed_versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed here."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


class VersionTable:
    """The first version of each library that was seen, and where."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, str]] = {}

    def differences(self, node: str, versions: Mapping[str, str]) -> list[str]:
        """Take what a node has; return what differs from a node before, in words.

        A library that a node lacks is no difference: what needs it says so.

        >>> table = VersionTable()
        >>> table.differences("head", {"numpy": "2.1.0", "h5py": "3.14.0"})
        []
        >>> table.differences("gpu-1", {"numpy": "2.2.0"})
        ['numpy is 2.1.0 on head and 2.2.0 on gpu-1']
        """
        found = []
        for library, here in versions.items():
            first, there = self._first.setdefault(library, (here, node))
            if first != here:
                found.append(f"{library} is {first} on {there} and {here} on {node}")
        return found
