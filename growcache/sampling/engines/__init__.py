"""The contract of engines, which run samplers as child processes or as actors of a Ray cluster.

The supervisor knows samplers only by their messages, so an engine is a way to start one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from growcache.sampling.messages import Message


@dataclass(frozen=True, slots=True)
class SamplerEnd:
    """The end of a sampler.

    Attributes:
        code: Exit code, like that of a process: negative for a signal.
        reason: Reason in words, if the code does not show it.
    """

    code: int
    reason: str = ""


class RunningSampler(Protocol):
    """A sampler that an engine has started."""

    @property
    def pid(self) -> int: ...

    @property
    def node(self) -> str | None:
        """Name of the sampler's machine; None for this one."""

    def send(self, message: Message) -> None:
        """Send a message. If the sampler is dead it is lost, and `ended` reports the death."""

    async def ended(self) -> SamplerEnd:
        """Wait until the sampler is gone and all its messages are read; return how it ended."""

    def kill(self) -> None: ...

    async def stop(self) -> None:
        """Let the sampler report the bytes that it read, and end it."""


class Engine(Protocol):
    """A way to run samplers."""

    @property
    def waiting_for(self) -> str:
        """The event without which its samplers cannot start, in words."""

    async def start(self, number: int, on_message: Callable[[Message], None]) -> RunningSampler:
        """Start the sampler of a slot, or wait until it can start.

        Args:
            number: Number of the slot.
            on_message: Called with each message of the sampler.

        Raises:
            OSError: It will never start.
        """

    async def stop(self) -> None:
        """End everything that the engine has besides samplers, which are stopped already."""
