"""The local engine: each sampler is a child of the supervisor."""

from __future__ import annotations

from collections.abc import Callable

from growcache.sampling.engines.child import EngineProcess
from growcache.sampling.messages import Message


class LocalEngine:
    waiting_for = ""

    def __init__(self, on_stderr: Callable[[bytes], None] | None = None) -> None:
        self._on_stderr = on_stderr

    async def start(self, number: int, on_message: Callable[[Message], None]) -> EngineProcess:
        return await EngineProcess.start("sampler", on_message, self._on_stderr)

    async def stop(self) -> None:
        """Do nothing, because a local engine has only its samplers."""
