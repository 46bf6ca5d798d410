"""The writer's end of one actor: its life, its messages, and the way of its shards to the disk."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from growcache.config_ray import RayConfig
from growcache.errors import ConfigError, SamplingError
from growcache.sampling.delivery import IncomingFiles
from growcache.sampling.engines.child import ENVIRONMENT
from growcache.sampling.engines.in_flight import InFlightBytes
from growcache.sampling.engines.library_versions import VersionTable
from growcache.sampling.engines.ray_actor import CONCURRENCY_GROUPS, SamplerActor
from growcache.sampling.engines.ray_cluster import node_name
from growcache.sampling.engines.sent_code import SentCode
from growcache.sampling.messages import Message

PENDING_SECONDS = 3.0  # until an actor that does not start is worth a word
KILL_SECONDS = 5.0  # for Ray to kill an actor: without its head it cannot
MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Shared:
    """What the links of all actors use."""

    config: RayConfig
    setup: Message
    code: SentCode
    files: IncomingFiles
    in_flight: InFlightBytes
    versions: VersionTable
    send: Callable[[Message], None]
    pending: set[int] = field(default_factory=set)  # slots whose actors have not started

    def note_pending(self, slot: int) -> None:
        self.pending.add(slot)
        self._say()

    def note_started(self, slot: int) -> None:
        self.pending.discard(slot)
        self._say()

    def _say(self) -> None:
        event = ""
        if self.pending:
            event = (
                f"a node of Ray with room for a sampler ({_needs_words(self.config)}; "
                f"{len(self.pending)} of {self.config.workers} do not run)"
            )
        self.send({"type": "waiting", "event": event})

    def refuse(self, error: str, exit_code: int = SamplingError.exit_code) -> None:
        self.send({"type": "refused", "error": error, "exit_code": exit_code})


def _needs_words(config: RayConfig) -> str:
    needs = [f"num_cpus {config.num_cpus:g}"]
    needs += [f"{name} {amount:g}" for name, amount in config.resources.items()]
    needs += [f"{name}={value}" for name, value in config.label_selector.items()]
    return ", ".join(needs)


class ActorLink:
    def __init__(self, slot: int, shared: Shared) -> None:
        self._slot = slot
        self._shared = shared
        self._needs: dict[str, int] = {}  # bytes, by permit
        self._transfers: set[asyncio.Task[None]] = set()
        self._killed = asyncio.Event()
        self._actor: Any = None

    def start(self) -> None:
        self._life = asyncio.create_task(self._live())

    def relay(self, message: Message) -> None:
        """Pass a message of the supervisor on; a grant takes the shards."""
        if message["type"] == "grant":
            self._begin(self._transfer(message["id"]))
        else:
            self._actor.tell.remote([message])

    def finish(self) -> None:
        """Let the actor say what it read last, and end it."""
        if self._actor is None:
            self._killed.set()
        else:
            self._actor.finish.remote()

    def kill(self) -> None:
        self._killed.set()

    def _begin(self, transfer: Any) -> None:
        task = asyncio.create_task(transfer)
        self._transfers.add(task)
        task.add_done_callback(self._transfers.discard)

    # ------------------------------------------------------------------- its life

    async def _live(self) -> None:
        speaking = asyncio.create_task(self._speak())
        killed = asyncio.create_task(self._killed.wait())
        await asyncio.wait({speaking, killed}, return_when=asyncio.FIRST_COMPLETED)
        code, reason = -signal.SIGKILL, "killed"
        if speaking.done():
            code, reason = speaking.result()
        speaking.cancel()
        killed.cancel()
        await self._end_actor()
        self._shared.note_started(self._slot)
        self._tell_supervisor({"type": "ended", "code": code, "reason": reason})

    async def _end_actor(self) -> None:
        if self._actor is not None:
            kill = asyncio.to_thread(ray.kill, self._actor)
            await asyncio.wait({asyncio.ensure_future(kill)}, timeout=KILL_SECONDS)
        # What is being written belongs to permits that the supervisor gives up next.
        for transfer in self._transfers:
            transfer.cancel()
        await asyncio.gather(*self._transfers, return_exceptions=True)

    async def _speak(self) -> tuple[int, str]:
        """Relay the messages of the actor until it ends; return how it ended."""
        try:
            if not await self._introduced():
                return 1, "refused"
            while True:
                for message in await self._actor.hear.remote():
                    if message["type"] == "finished":
                        return 0, ""
                    self._heard(message)
        except RayTaskError as error:  # a defect, or a node without growcache
            text = _short(error.cause if error.cause is not None else error)
            self._shared.refuse(f"a sampler cannot run on Ray: {text}")
            return 1, text
        except RayError as error:
            return -signal.SIGKILL, _short(error)

    async def _introduced(self) -> bool:
        shared = self._shared
        self._actor = _actor(shared.config)
        pending = asyncio.get_running_loop().call_later(
            PENDING_SECONDS, shared.note_pending, self._slot
        )
        try:
            known = await self._actor.introduce.remote()
        finally:
            pending.cancel()
        name = await asyncio.to_thread(node_name, known["node_id"], known["host"])
        differences = shared.versions.differences(name, known["versions"])
        if differences:
            shared.refuse(
                f"{'; '.join(differences)}: the same shard could have other bytes there; install "
                "the same versions on all nodes of Ray"
            )
            return False
        await self._actor.begin.remote(shared.setup, shared.code)
        shared.note_started(self._slot)
        self._tell_supervisor({"type": "started", "pid": known["pid"], "node": name})
        return True

    def _heard(self, message: Message) -> None:
        if message["type"] == "need":
            if message["bytes"] > self._shared.in_flight.most:
                self._shared.refuse(
                    f"sampling.ray.in_flight_bytes: one group of shards takes "
                    f"{message['bytes']:,} bytes, and {self._shared.in_flight.most:,} may be on "
                    "their way; raise it (and Ray's object store, of which it gets three "
                    "quarters at most), or lower sampling.shard_samples",
                    ConfigError.exit_code,
                )
            self._needs[message["id"]] = message["bytes"]
        self._tell_supervisor({"type": "said", "message": message})

    def _tell_supervisor(self, message: Message) -> None:
        self._shared.send({**message, "slot": self._slot})

    # ----------------------------------------------------------------- its shards

    async def _transfer(self, permit_id: str) -> None:
        """Bring the shards of a granted permit to the disk, and tell the actor."""
        disk = lost = ""
        async with self._shared.in_flight.room(self._needs.pop(permit_id)):
            shards = self._actor.take.remote(permit_id)
            try:
                await self._write(permit_id, shards)
            except RayActorError:
                return  # its end is noticed by `_speak`
            except RayError as error:
                lost = f"the group was lost on its way from a Ray node: {_short(error)}"
            except OSError as error:
                disk = str(error)
            del shards
        self._actor.tell.remote(
            [{"type": "delivered", "id": permit_id, "disk": disk, "lost": lost}]
        )

    async def _write(self, permit_id: str, shards: Any) -> None:
        sent = await asyncio.to_thread(ray.get, shards)  # mapped, not copied
        encoded = [shard.encoded() for shard in sent]
        await self._shared.files.deliver(permit_id, encoded)


def _actor(config: RayConfig) -> Any:
    remote: Any = ray.remote  # whose types lack concurrency groups
    return (
        remote(concurrency_groups=CONCURRENCY_GROUPS)(SamplerActor)
        .options(
            num_cpus=config.num_cpus,
            resources=config.resources or None,
            label_selector=config.label_selector or None,
            max_restarts=0,  # the supervisor starts another one, which gets its setup
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": ENVIRONMENT},
        )
        .remote()
    )


def _short(error: BaseException) -> str:
    """Return the lines of one of Ray's errors as one, without the advice."""
    text = " ".join(str(error).split())
    return (
        text if len(text) <= MAX_REASON_CHARACTERS else text[: MAX_REASON_CHARACTERS - 1] + "…"
    )
