"""The errors of growcache.

    GrowcacheError
    ├── ConfigError(ValueError)            a setting or argument is not valid            exit 2
    │   └── MissingLibraryError            it needs a library that is not installed      exit 2
    ├── CacheError
    │   ├── CacheMissingError(FileNotFoundError)   no cache at that path                 exit 2
    │   ├── CacheGoneError                 it was removed or replaced under a service    exit 1
    │   ├── CacheBusyError                 another supervisor owns the directory         exit 2
    │   ├── CachePathError(ConfigError)    no cache can be made at that path             exit 2
    │   ├── FingerprintError(ConfigError)  the cache was filled by another config        exit 2
    │   ├── CacheFullError(OSError)        the disk, not the bound, has no room          exit 1
    │   │   └── LeasesFullError            other readers take all the room for leases    exit 1
    │   ├── IndexInDoubtError              a change may or may not have been kept        exit 1
    │   ├── PurgedSampleError              a sample that is being removed                exit 1
    │   └── CorruptShardError              a shard's bytes are not what was written      exit 1
    ├── StoreError(OSError)
    │   ├── TransientStoreError            worth another try (timeout, 503, reset)
    │   │   └── StoreRefusedError          the store refuses every request of this client
    │   │       ├── CredentialsError(AccessError)         credentials, clock, certificate  exit 2
    │   │       └── StoreMissingError(ObjectMissingError) no bucket, no folder, no mount   exit 2
    │   ├── ObjectMissingError             permanent: the object is gone
    │   ├── ObjectChangedError             permanent: the object was rewritten
    │   └── AccessError(PermissionError)   permanent: the store refuses this object      exit 2
    ├── JournalError                       a journal cannot be written or read           exit 1
    ├── FormatError(ValueError)            an object or sample is not what the format says
    └── SamplingError                      the service gives up, with its reasons        exit 1

Every message states the expected value, the found value and the next step. It contains no
secret that `secrecy` knows. The command line exits with the class attribute ``exit_code``.

Each error has the code of its class, or of the place that raises it:
``ConfigError(text, code="GC102")``. Errors with the same remedy share a code.
`growcache.cli.explanations` has a page for each code, which ``growcache explain GC102`` prints.
A code is never reused for another error, and the page of an unused code stays.

The traceback of an uncaught error of this tree shows only the user's own lines, because frames
of growcache help only its authors. All other exceptions are shown in full. The environment
variable ``GROWCACHE_TRACEBACK`` shows everything.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, Literal

from growcache.secrecy import hide_secrets

# fmt: off
ErrorCode = Literal[
    # configuration
    "GC101", "GC102", "GC103", "GC104", "GC105", "GC106", "GC107", "GC108", "GC109", "GC110",
    "GC111", "GC112", "GC113", "GC114",
    # store and credentials
    "GC201", "GC202", "GC203", "GC204", "GC205", "GC206", "GC207", "GC208", "GC209", "GC210",
    "GC211", "GC212", "GC213", "GC214", "GC215", "GC216", "GC217", "GC218", "GC219",
    # objects and formats
    "GC301", "GC302", "GC303", "GC304", "GC305", "GC306", "GC307", "GC308", "GC309",
    # cache and disk
    "GC401", "GC402", "GC403", "GC404", "GC405", "GC406", "GC407", "GC408", "GC409", "GC410",
    "GC411", "GC412", "GC413", "GC414", "GC415", "GC416", "GC417", "GC418",
    # samplers
    "GC501", "GC502", "GC503", "GC504", "GC505", "GC506",
    # loading
    "GC601", "GC602", "GC603", "GC604", "GC605", "GC606", "GC607", "GC608", "GC609", "GC610",
    "GC611", "GC612", "GC613",
    # machines, ranks and Ray
    "GC701", "GC702", "GC703", "GC704", "GC705", "GC706", "GC707",
    # environment
    "GC801", "GC802", "GC803",
]
# fmt: on


class GrowcacheError(Exception):
    """Base class of every error that growcache raises deliberately."""

    exit_code = 1
    code: ErrorCode

    def __init__(self, *arguments: object, code: ErrorCode | None = None) -> None:
        super().__init__(*(hide_secrets(a) if isinstance(a, str) else a for a in arguments))
        if code is not None:
            self.code = code
        self.add_note(code_hint(self.code))  # tracebacks show it after the message


def code_hint(code: str) -> str:
    """Return the hint at the end of a message that says how to learn more.

    >>> code_hint("GC401")
    '(GC401; growcache explain GC401)'
    """
    return f"({code}; growcache explain {code})"


def coded_text(error: BaseException) -> str:
    """Return the message with its bare code, for a status, a log or a list of reasons.

    >>> coded_text(CacheFullError("no room")), coded_text(KeyError("x"))
    ('no room (GC411)', "'x'")
    """
    return f"{error} ({error.code})" if isinstance(error, GrowcacheError) else str(error)


class ConfigError(GrowcacheError, ValueError):
    """A configuration, argument or URL is not valid."""

    code: ErrorCode = "GC101"
    exit_code = 2


class MissingLibraryError(ConfigError):
    """A setting needs a library that is not installed. The message says how to install it."""

    code: ErrorCode = "GC801"


class CacheError(GrowcacheError):
    """Base class of errors about the cache directory."""

    code: ErrorCode = "GC416"


class CacheMissingError(CacheError, FileNotFoundError):
    """No cache is at the path."""

    code: ErrorCode = "GC401"
    exit_code = 2


class CacheGoneError(CacheError):
    """A cache was removed, moved or replaced while a service ran on it."""

    code: ErrorCode = "GC403"


class CacheBusyError(CacheError):
    """Another supervisor owns the cache directory."""

    code: ErrorCode = "GC404"
    exit_code = 2


class CachePathError(CacheError, ConfigError):
    """No cache can be made at the path: a file, no permission, or a network file system."""

    code: ErrorCode = "GC405"
    exit_code = 2


class FingerprintError(CacheError, ConfigError):
    """The cache was filled with a configuration that yields other samples."""

    code: ErrorCode = "GC409"
    exit_code = 2


class OtherSamplesError(FingerprintError):
    """The cache holds samples that this configuration would not draw. They can be replaced."""

    code: ErrorCode = "GC410"


class CacheFullError(CacheError, OSError):
    """The file system has no room, although the bound allows more."""

    code: ErrorCode = "GC411"


class LeasesFullError(CacheFullError):
    """The leases of other readers take all of the bound that leases may take."""

    code: ErrorCode = "GC412"


class IndexInDoubtError(CacheError):
    """The disk failed during a change of the index, which may or may not have been saved."""

    code: ErrorCode = "GC413"


class PurgedSampleError(CacheError):
    """A sample belongs to a purged object and is being removed."""

    code: ErrorCode = "GC414"


class CorruptShardError(CacheError):
    """The bytes of a shard differ from those that were written."""

    code: ErrorCode = "GC415"


class StoreError(GrowcacheError, OSError):
    """The remote store did not answer a request as it should."""

    code: ErrorCode = "GC201"


class TransientStoreError(StoreError):
    """A failure that a retry may cure: timeout, throttling, reset."""

    code: ErrorCode = "GC202"
    since: float | None = None  # first failure of several attempts, monotonic seconds
    status: int | None = None  # of HTTP, if the store answered with an error
    throttled: bool = False  # the store is overloaded, or did not answer in time
    # Seconds to wait that the store asks for, if the client shows them.
    retry_after: float = 0.0


class ObjectMissingError(StoreError):
    """The object does not exist, or no longer exists."""

    code: ErrorCode = "GC210"


class ObjectChangedError(StoreError):
    """The object was rewritten after it was listed."""

    code: ErrorCode = "GC211"


class AccessError(StoreError, PermissionError):
    """The store refuses the credentials, the bucket or the key."""

    code: ErrorCode = "GC209"
    exit_code = 2


class StoreRefusedError(TransientStoreError):
    """The store refuses every request of this client, whichever object it asks for.

    A few retries would not help. The service therefore waits until the missing thing is there,
    and asks again from time to time.
    """

    code: ErrorCode = "GC203"
    wanted = "the store"  # the missing thing, for messages


class CredentialsError(StoreRefusedError, AccessError):
    """The store refuses this client: credentials, permissions of all keys, clock or certificate."""

    code: ErrorCode = "GC204"
    wanted = "credentials"


class BudgetSpentError(StoreRefusedError):
    """`sampling.max_egress` does not allow this service to read more."""

    code: ErrorCode = "GC213"


class StoreMissingError(StoreRefusedError, ObjectMissingError):
    """The bucket, folder or mount that holds all objects is not there."""

    code: ErrorCode = "GC212"
    exit_code = 2


class JournalError(GrowcacheError):
    """A loader's journal cannot be written, or a recorded step cannot be delivered again."""

    code: ErrorCode = "GC609"


class FormatError(GrowcacheError, ValueError):
    """An object or a sample does not fit its format or schema."""

    code: ErrorCode = "GC301"


class SamplingError(GrowcacheError):
    """The service gives up. The message has the reasons."""

    code: ErrorCode = "GC501"


TRACEBACK_VARIABLE = "GROWCACHE_TRACEBACK"
OWN_PACKAGE = __name__.partition(".")[0]
STANDARD_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib would delay each start


def install_excepthook() -> None:
    """Show uncaught errors without frames of growcache, through the previous hook."""
    before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> Any:
        if isinstance(error, GrowcacheError) and not os.environ.get(TRACEBACK_VARIABLE):
            trace = without_own_frames(trace)
            # The message already names the cause.
            error.__cause__, error.__suppress_context__ = None, True
            error.__traceback__ = trace
        return before(kind, error, trace)

    sys.excepthook = show


def without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of growcache, or of the standard library at its end."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not _is_own_frame(trace):
            kept.append(trace)
        trace = trace.tb_next
    while kept and _is_standard_library_frame(kept[-1]):
        kept.pop()
    rest: TracebackType | None = None
    for one in reversed(kept):
        rest = TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rest


def _is_own_frame(trace: TracebackType) -> bool:
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == OWN_PACKAGE


def _is_standard_library_frame(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name.startswith(STANDARD_LIBRARY + os.sep) and "site-packages" not in name
