"""Which names in a cache directory are growcache's own: nothing else is ever removed.

Names alone do not make a folder a cache (`growcache.cache.adoption` decides that). They say
which entries of a cache may go.
"""

from __future__ import annotations

import re

from growcache.cache.files import ARRAYS, OFFSETS, SHARD_PARTS, Layout, shard_names

REMOVED = "removed-"  # begins the names of folders of arrays on their way out
SET_ASIDE = "set-aside-"  # begins the names of files that repair took out of the shards

_NUMBER = r"(?P<number>[0-9]{8,})"
_PARTS = "|".join(re.escape(part) for part in SHARD_PARTS)
_SHARD = re.compile(rf"{_NUMBER}(?:{_PARTS})")
# The run's id, the group, the try, and an id of the permit's own; see `Dispatcher`.
_PERMIT = r"[0-9a-f]{8}-[0-9]{8,}-[0-9]+-[0-9a-f]{4}"
_INCOMING = re.compile(
    rf"(?:{_PERMIT}-|{REMOVED}[0-9a-f]{{8}}|{SET_ASIDE})[0-9]{{8,}}(?:{_PARTS})"
)
_ROOT = [path.name for path in Layout("/").own_files]
_TEMPORARY = re.compile(rf"\.(?:{'|'.join(map(re.escape, _ROOT))})\.[0-9a-f]{{8}}\.tmp")
_LEASE = re.compile(r"[0-9a-f]{32}\.lease")
_LEASE_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")


def is_shard(name: str) -> bool:
    """Return whether a file or folder of arrays in ``shards`` has a name of ours.

    >>> is_shard("00000007.json"), is_shard("00000007.csv"), is_shard("7.json")
    (True, False, False)
    """
    match = _SHARD.fullmatch(name)
    return match is not None and name in shard_names(int(match["number"]))


def is_incoming(name: str) -> bool:
    """Return whether an entry of ``incoming`` has a name of ours: by its permit, mostly.

    >>> is_incoming("0123abcd-00000007-0-ef01-00000007.json"), is_incoming("a-00000007.json")
    (True, False)
    """
    return _INCOMING.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """Return whether an entry of the cache directory is one that a crash kept from its name.

    >>> is_temporary(".issued.0123abcd.tmp"), is_temporary(".thesis.0123abcd.tmp")
    (True, False)
    """
    return _TEMPORARY.fullmatch(name) is not None


def is_lease_temporary(name: str) -> bool:
    """Return whether an entry of ``leases`` is a lease that its reader had begun to write."""
    return _LEASE_TEMPORARY.fullmatch(name) is not None


def is_lease(name: str) -> bool:
    """Return whether an entry of ``leases`` is one, or was going to be."""
    return _LEASE.fullmatch(name) is not None or is_lease_temporary(name)


def is_folder_of_arrays(name: str) -> bool:
    """Return whether an entry with a name of ours must be a folder: all others are files.

    >>> is_folder_of_arrays("00000007.npy"), is_folder_of_arrays("00000007.offsets.npy")
    (True, False)
    """
    return name.endswith(ARRAYS) and not name.endswith(OFFSETS)
