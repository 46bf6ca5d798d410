"""Where samplers run: as children of the supervisor, or as actors of a Ray cluster.

The supervisor knows samplers only by their messages, so an engine is a way to start one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from growcache.sampling.messages import Message


@dataclass(frozen=True, slots=True)
class SamplerEnd:
    code: int  # as of a process: negative for a signal
    reason: str = ""  # in words, where the code does not say it


class RunningSampler(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str | None:
        """The name of its machine; None for this one."""

    def send(self, message: Message) -> None:
        """A message to a dead sampler is lost, and `ended` reports the death."""

    async def ended(self) -> SamplerEnd:
        """Return once it is gone and all its messages are read."""

    def kill(self) -> None: ...

    async def stop(self) -> None:
        """Let it report what it read, and end it."""


class Engine(Protocol):
    @property
    def waiting_for(self) -> str:
        """The event without which its samplers cannot start, in words."""

    async def start(self, number: int, on_message: Callable[[Message], None]) -> RunningSampler:
        """Start the sampler of a slot, or wait until it can start. OSError: it never will."""

    async def stop(self) -> None:
        """End what the engine has besides samplers; these are stopped."""
