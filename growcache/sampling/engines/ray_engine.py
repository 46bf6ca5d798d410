"""The Ray engine: samplers are actors of a Ray cluster.

One child of the supervisor, the writer, is Ray's driver (`ray_writer`). It relays messages
between the supervisor and all actors, and writes their shards. So the supervisor neither
imports Ray nor handles samples.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from growcache.config_ray import LOCAL, RayConfig
from growcache.sampling.engines import SamplerEnd
from growcache.sampling.engines.child import EngineProcess
from growcache.sampling.engines.ray_folder import RayFolder
from growcache.sampling.messages import Message, refusal_error
from growcache.usercode import printable

_log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.5, 15.0  # between starts of the writer
STOP_SECONDS = 5.0  # for an actor's last report
KILLED = SamplerEnd(-signal.SIGKILL, "its writer process ended")

OnMessage = Callable[[Message], None]


def _ray_variables(config: RayConfig) -> dict[str, str]:
    """Return the variables that Ray reads at its import."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default, which otherwise warns about itself.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_task_events_report_interval_ms": "0",  # of calls, which messages would dominate
    }
    if config.address == LOCAL:
        # Otherwise Ray would write a token into the home directory.
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {name: os.environ.get(name, value) for name, value in variables.items()}


class RaySampler:
    """One actor, as the supervisor sees it."""

    def __init__(self, number: int, writer: WriterProcess, on_message: OnMessage) -> None:
        self.pid = 0
        self.node: str | None = None
        self.started: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._number = number
        self._writer = writer
        self._on_message = on_message
        self._held: list[Message] | None = []  # messages before the pool knew of it
        self._end: asyncio.Future[SamplerEnd] = asyncio.get_running_loop().create_future()

    def send(self, message: Message) -> None:
        self._writer.send({"to": self._number, "message": message})

    def receive(self, message: Message) -> None:
        if self._held is not None:
            self._held.append(message)
        elif not self._end.done():
            self._on_message(message)

    def pass_on_held(self) -> None:
        held, self._held = self._held or [], None
        for message in held:
            self.receive(message)

    def note_start(self, pid: int, node: str) -> None:
        self.pid, self.node = pid, node
        if not self.started.done():
            self.started.set_result(True)

    def note_end(self, end: SamplerEnd) -> None:
        if not self.started.done():
            self.started.set_result(False)
        if not self._end.done():
            self._end.set_result(end)

    async def ended(self) -> SamplerEnd:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        self._writer.send({"type": "kill", "slot": self._number})

    async def stop(self) -> None:
        self._writer.send({"type": "stop", "slot": self._number})
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended(), STOP_SECONDS)


class WriterProcess:
    """The writer, and the samplers whose messages it relays."""

    def __init__(
        self, on_notice: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        self._on_notice = on_notice
        self._on_end = on_end
        self._samplers: dict[int, RaySampler] = {}
        self._process: EngineProcess | None = None
        self._life: asyncio.Task[None] | None = None
        self.alive = False

    async def start(
        self,
        setup: Message,
        variables: Mapping[str, str],
        on_stderr: Callable[[bytes], None] | None,
    ) -> None:
        self._process = await EngineProcess.start(
            "ray-writer", self._receive, on_stderr, variables
        )
        self.alive = True
        self.send(setup)
        self._life = asyncio.create_task(self._await_end())

    def send(self, message: Message) -> None:
        if self._process is not None:
            self._process.send(message)

    def sampler(self, number: int, on_message: OnMessage) -> RaySampler:
        sampler = RaySampler(number, self, on_message)
        self._samplers[number] = sampler
        self.send({"type": "start", "slot": number})
        return sampler

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    def _receive(self, line: Message) -> None:
        slot = line.get("slot")
        if slot is None:
            self._on_notice(line)
            return
        sampler = self._samplers.get(slot)
        if sampler is None:
            return
        match line["type"]:
            case "said":
                sampler.receive(line["message"])
            case "started":
                sampler.note_start(line["pid"], line["node"])
            case "ended":
                del self._samplers[slot]
                sampler.note_end(SamplerEnd(line["code"], line["reason"]))

    async def _await_end(self) -> None:
        assert self._process is not None
        await self._process.ended()
        self.alive = False
        self._on_end()
        for sampler in self._samplers.values():
            sampler.note_end(KILLED)


class RayEngine:
    def __init__(
        self,
        config: RayConfig,
        setup: Message,
        on_failure: Callable[[Exception], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> None:
        self._config = config
        self._await_cluster()
        self._has_warned = False  # about the event that its samplers wait for
        self._setup = setup
        self._on_failure = on_failure
        self._on_stderr = on_stderr
        self._writer: WriterProcess | None = None
        self._starting = asyncio.Lock()
        self._backoff = FIRST_BACKOFF_SECONDS
        # For a Ray that the service starts.
        self._folder = RayFolder() if config.address == LOCAL else None

    async def start(self, number: int, on_message: OnMessage) -> RaySampler:
        seconds = FIRST_BACKOFF_SECONDS
        while True:
            writer = await self._running_writer()
            sampler = writer.sampler(number, on_message)
            if await sampler.started:
                self._backoff = FIRST_BACKOFF_SECONDS
                # After the caller has it, because an answer would be lost before.
                asyncio.get_running_loop().call_soon(sampler.pass_on_held)
                return sampler
            if writer.alive:
                self.waiting_for = (
                    f"samplers to start on Ray ({(await sampler.ended()).reason})"
                )
            await asyncio.sleep(seconds)
            seconds = min(LONGEST_BACKOFF_SECONDS, 2 * seconds)

    async def stop(self) -> None:
        if self._writer is not None:
            await self._writer.stop()
        if self._folder is not None:
            self._folder.remove()

    async def _running_writer(self) -> WriterProcess:
        async with self._starting:
            if self._writer is None or not self._writer.alive:
                if self._writer is not None:
                    await asyncio.sleep(self._backoff)
                    self._backoff = min(LONGEST_BACKOFF_SECONDS, 2 * self._backoff)
                self._writer = WriterProcess(self._noticed, self._await_cluster)
                folder = None if self._folder is None else self._folder.path
                setup = {**self._setup, "folder": folder}
                variables = _ray_variables(self._config)
                await self._writer.start(setup, variables, self._on_stderr)
            return self._writer

    def _await_cluster(self) -> None:
        self.waiting_for = f"{self._config.cluster} to answer"

    def _noticed(self, notice: Message) -> None:
        if notice["type"] == "waiting":
            event = self.waiting_for = notice["event"]
            if event and not self._has_warned:
                _log.warning("samplers on Ray wait for %s", printable(event))
            self._has_warned = bool(event)
        elif notice["type"] == "refused":
            self._on_failure(refusal_error(notice))
