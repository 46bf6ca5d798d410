"""Versions of libraries that affect the content of shards: equal on all machines, or the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

# Decoders, and libraries that make arrays of decoded data.
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
    """The first version that was seen of each library, and on which node."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, str]] = {}

    def differences(self, node: str, versions: Mapping[str, str]) -> list[str]:
        """Add a node's versions; return the differences from earlier nodes, in words.

        A missing library is not a difference, because the code that needs it reports that.

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
