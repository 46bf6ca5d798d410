"""The errors of growcache.

    GrowcacheError
    ├── ConfigError(ValueError)            what the user typed cannot be meant        exit 2
    │   └── MissingLibraryError            it needs a library that is not installed   exit 2
    ├── CacheError
    │   ├── CacheMissingError(FileNotFoundError)   no cache at that path               exit 2
    │   ├── CacheGoneError                 it was removed or replaced under a service  exit 1
    │   ├── CacheBusyError                 another supervisor owns the directory      exit 2
    │   ├── CachePathError(ConfigError)    no cache can be made at that path          exit 2
    │   ├── FingerprintError(ConfigError)  the cache was filled by another config     exit 2
    │   ├── CacheFullError(OSError)        the disk, not the bound, has no room       exit 1
    │   │   └── LeasesFullError            others take all the room for leases        exit 1
    │   ├── IndexInDoubtError              nobody knows whether a change was kept      exit 1
    │   └── CorruptShardError              a shard's bytes are not what was written   exit 1
    ├── StoreError(OSError)
    │   ├── TransientStoreError            worth another try (timeout, 503, reset)
    │   │   └── StoreRefusedError          the store answers nobody like us, whatever the object
    │   │       ├── CredentialsError(AccessError)         credentials, clock, certificate  exit 2
    │   │       └── StoreMissingError(ObjectMissingError) no bucket, no folder, no mount   exit 2
    │   ├── ObjectMissingError             permanent: the object is gone
    │   ├── ObjectChangedError             permanent: the object was rewritten
    │   └── AccessError(PermissionError)   permanent: the store refuses this object   exit 2
    ├── FormatError(ValueError)            an object or sample is not what the format says
    └── SamplingError                      the service gives up, with its reasons     exit 1

Every message says what was expected, what was found, and what to do next, and holds none of
the secrets that `secrecy` knows. The class attribute ``exit_code`` is what the command line
ends with.
"""

from __future__ import annotations

from growcache.secrecy import hide


class GrowcacheError(Exception):
    """Base of every error that growcache raises on purpose."""

    exit_code = 1

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(hide(a) if isinstance(a, str) else a for a in arguments))


class ConfigError(GrowcacheError, ValueError):
    """A configuration, argument or URL that cannot be meant."""

    exit_code = 2


class MissingLibraryError(ConfigError):
    """What is configured needs a library that is not installed; the message says how to."""


class CacheError(GrowcacheError):
    """Something about the cache directory."""


class CacheMissingError(CacheError, FileNotFoundError):
    """There is no cache at the path."""

    exit_code = 2


class CacheGoneError(CacheError):
    """A cache was removed, moved or replaced while a service ran on it."""


class CacheBusyError(CacheError):
    """Another supervisor owns the cache directory."""

    exit_code = 2


class CachePathError(CacheError, ConfigError):
    """No cache can be made at the path: a file, no permission, a network file system."""

    exit_code = 2


class FingerprintError(CacheError, ConfigError):
    """The cache was filled by a configuration that yields other samples."""

    exit_code = 2


class CacheFullError(CacheError, OSError):
    """The file system has no room, whatever the bound says."""


class LeasesFullError(CacheFullError):
    """The part of the bound that is for leases is taken by those of other readers."""


class IndexInDoubtError(CacheError):
    """The disk failed while the index was told to keep a change: it may have, or not."""


class CorruptShardError(CacheError):
    """The bytes of a shard are not those that were written."""


class StoreError(GrowcacheError, OSError):
    """The remote store did not give what was asked for."""


class TransientStoreError(StoreError):
    """A failure that another try may cure: timeout, throttling, reset.

    Attributes:
        since: when the first of several tries failed, monotonic seconds; None where that is
            not known.
    """

    since: float | None = None


class ObjectMissingError(StoreError):
    """The object does not exist (any more)."""


class ObjectChangedError(StoreError):
    """The object was rewritten since it was listed."""


class AccessError(StoreError, PermissionError):
    """The store refuses the credentials, the bucket or the key."""

    exit_code = 2


class StoreRefusedError(TransientStoreError):
    """A refusal that is the store's: it says nothing about the object that was asked for.

    It ends when what is missing is there, so trying again for a while is of no use and giving up
    would be wrong: whoever works on waits for that, and asks now and then.

    Attributes:
        wanted: what is missing, in a word or two.
    """

    wanted = "the store"


class CredentialsError(StoreRefusedError, AccessError):
    """The store refuses who asks: credentials, permissions of all keys, clock or certificate."""

    wanted = "credentials"


class StoreMissingError(StoreRefusedError, ObjectMissingError):
    """The bucket, folder or mount that holds all objects is not there."""

    exit_code = 2


class FormatError(GrowcacheError, ValueError):
    """An object or a sample is not what its format or schema says."""


class SamplingError(GrowcacheError):
    """The service gives up; the message carries the reasons."""
