"""What `check` finds, and what repair has done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "info", "mended"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        severity: ``info`` for what the next start clears up by itself, ``mended`` for an
            error that is none any more.
        shard: the number, where it is about one.
        message: what was expected and what was found.
        mendable: whether ``--repair`` puts it right.
    """

    severity: Severity
    shard: int | None
    message: str
    mendable: bool = False
