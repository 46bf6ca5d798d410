"""A process's command line, fit to be kept on disk: readable, without its secrets.

Lock files, leases and the status outlive the process, and are copied along with a cache.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

HIDDEN = "HIDDEN"  # of letters alone, so that a shell needs no quotes around it

_OVERRIDE = re.compile(r"(?:--[\w-]+=)?[^=]*=")
# A password may hold "/" and "@", where it was not quoted as it should: rather too much is
# hidden than too little.
_USERINFO = re.compile(r"(?<=://)(?:[^/\s:]*:\S*|[^/\s]*)@")
_SIGNED = re.compile(
    r"([?&][^=&\s]*(?:sig|token|secret|password|credential|key)[^=&\s]*=)[^&\s]+", re.IGNORECASE
)


def readable_command(arguments: Sequence[str]) -> str:
    """Return a command line as a shell would take it, with what may be secret hidden.

    Values of ``storage_options``, the user and password of URLs, and their signatures.

    >>> readable_command(["run", "--set", "source.storage_options.secret=x", "s3://k:s@b/**"])
    "run --set source.storage_options.secret=HIDDEN 's3://HIDDEN@b/**'"
    """
    return shlex.join(map(_without_secrets, [Path(arguments[0]).name, *arguments[1:]]))


def _without_secrets(argument: str) -> str:
    if "storage_options" in argument and (override := _OVERRIDE.match(argument)):
        return f"{override[0]}{HIDDEN}"
    argument = _USERINFO.sub(f"{HIDDEN}@", argument)
    return _SIGNED.sub(rf"\1{HIDDEN}", argument) if "://" in argument else argument
