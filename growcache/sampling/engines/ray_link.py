"""The writer's end of one actor: its life, its messages, and its shards on their way to the disk."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from growcache.config_ray import RayConfig
from growcache.errors import ConfigError, GrowcacheError, SamplingError
from growcache.sampling.delivery import IncomingFiles
from growcache.sampling.engines.child import ENVIRONMENT
from growcache.sampling.engines.in_flight import InFlightBytes
from growcache.sampling.engines.library_versions import VersionTable
from growcache.sampling.engines.permit_copies import CopiedPermit, PermitCopies, ShardOutcome
from growcache.sampling.engines.ray_actor import CONCURRENCY_GROUPS, SamplerActor
from growcache.sampling.engines.ray_cluster import node_name
from growcache.sampling.engines.sent_code import SentCode
from growcache.sampling.messages import Message, refusal_message

PENDING_SECONDS = 3.0  # until an actor that does not start is reported
KILL_SECONDS = 5.0  # for Ray to kill an actor, which it cannot without its head
MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Shared:
    """State that the links of all actors share."""

    config: RayConfig
    setup: Message
    code: SentCode
    files: IncomingFiles
    in_flight: InFlightBytes
    versions: VersionTable
    send: Callable[[Message], None]
    copies: PermitCopies = field(default_factory=PermitCopies)
    writing: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by permit
    # By slot, for actors with known versions.
    nodes: dict[int, str] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)  # slots whose actors have not started
    silent: set[str] = field(default_factory=set)  # reasons while the cluster does not answer

    def note_pending(self, slot: int) -> None:
        self.pending.add(slot)
        self._say()

    def note_started(self, slot: int) -> None:
        self.pending.discard(slot)
        self._say()

    def note_silence(self, silent: bool) -> None:
        self.silent.clear()
        if silent:
            self.silent.add(self.config.cluster)
        self._say()

    def _say(self) -> None:
        event = ""
        if self.silent:
            event = f"{self.config.cluster} to answer"
        elif self.pending:
            event = (
                f"a node of Ray with room for a sampler ({_needs_words(self.config)}; "
                f"{len(self.pending)} of {self.config.workers} do not run)"
            )
        self.send({"type": "waiting", "event": event})

    def refuse(self, error: GrowcacheError) -> None:
        self.send(refusal_message(error))


def _needs_words(config: RayConfig) -> str:
    needs = [f"num_cpus {config.num_cpus:g}"]
    needs += [f"{name} {amount:g}" for name, amount in config.resources.items()]
    needs += [f"{name}={value}" for name, value in config.label_selector.items()]
    return ", ".join(needs)


class ActorLink:
    def __init__(self, slot: int, shared: Shared) -> None:
        self.slot = slot
        self._shared = shared
        self._needs: dict[str, int] = {}  # bytes, by permit
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._killed = asyncio.Event()
        self._actor: Any = None
        self._told = 0  # number of messages
        self.fills = False  # whether it has everything that it needs to fill groups
        self.node = ""

    def start(self) -> None:
        self._life = asyncio.create_task(self._live())

    def send(self, message: Message) -> None:
        self.fills = self.fills or message["type"] == "identity"
        if self._actor is not None:
            self._actor.tell.remote(self._told, message)
            self._told += 1

    def revoke(self, permit_id: str) -> None:
        self._needs.pop(permit_id, None)
        self.send({"type": "revoke", "id": permit_id})

    def grant(self, permit_id: str) -> None:
        nbytes = self._needs.pop(permit_id, None)
        if nbytes is None:  # lost meanwhile, as the supervisor will see
            return
        writing = self._shared.writing
        task = writing[permit_id] = self._begin(self._transfer(permit_id, nbytes))
        task.add_done_callback(lambda _: writing.pop(permit_id, None))

    def finish(self) -> None:
        """Let the actor report its last reads, and end it."""
        if self._actor is None:
            self._killed.set()
        else:
            self._actor.finish.remote()

    def kill(self) -> None:
        self._killed.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ----------------------------------------------------------------- life cycle

    async def _live(self) -> None:
        speaking = asyncio.create_task(self._speak())
        killed = asyncio.create_task(self._killed.wait())
        await asyncio.wait({speaking, killed}, return_when=asyncio.FIRST_COMPLETED)
        code, reason = -signal.SIGKILL, "killed"
        if speaking.done():
            code, reason = speaking.result()
        speaking.cancel()
        killed.cancel()
        self.fills, self._is_over = False, True
        await self._end_actor()
        self._shared.note_started(self.slot)
        for lost in self._shared.copies.slot_ended(self.slot):
            self._say_lost(lost.message["id"], lost.owner, reason)
        self._tell_supervisor({"type": "ended", "code": code, "reason": reason})

    async def _end_actor(self) -> None:
        if self._actor is not None:
            kill = asyncio.to_thread(ray.kill, self._actor)
            await asyncio.wait({asyncio.ensure_future(kill)}, timeout=KILL_SECONDS)
        # The supervisor will withdraw these permits, and then nothing may write their files.
        copies, writing = self._shared.copies, self._shared.writing
        lost = [writing[one] for one in copies.owned_by(self.slot) if one in writing]
        await asyncio.gather(*self._tasks, *lost, return_exceptions=True)

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
            self._shared.refuse(
                SamplingError(f"a sampler cannot run on Ray: {text}", code="GC707")
            )
            return 1, text
        except Exception as error:  # noqa: BLE001 - without the node Ray may raise anything
            return -signal.SIGKILL, _short(error)

    async def _introduced(self) -> bool:
        shared = self._shared
        self._actor = _actor(shared.config)
        pending = asyncio.get_running_loop().call_later(
            PENDING_SECONDS, shared.note_pending, self.slot
        )
        try:
            known = await self._actor.introduce.remote()
        finally:
            pending.cancel()
        name = await asyncio.to_thread(node_name, known["node_id"], known["host"])
        differences = shared.versions.differences(name, known["versions"])
        if differences:
            unlike = SamplingError(
                f"{'; '.join(differences)}: the same shard could have other bytes there; install "
                "the same versions on all nodes of Ray",
                code="GC707",
            )
            shared.refuse(unlike)
            return False
        versions = ", ".join(f"{library} {one}" for library, one in known["versions"].items())
        shared.nodes[self.slot] = f"{name} ({versions})"
        self.node = name
        await self._actor.begin.remote(shared.setup, shared.code)
        shared.note_started(self.slot)
        self._tell_supervisor({"type": "started", "pid": known["pid"], "node": name})
        return True

    # ---------------------------------------------------------------- messages

    def _heard(self, message: Message) -> None:
        if "id" in message:
            self._heard_of_permit(message)
        else:
            self._pass_on(message, self.slot)

    def _heard_of_permit(self, message: Message) -> None:
        permit_id, copies = message["id"], self._shared.copies
        known = copies.of(permit_id)
        match message["type"]:
            case "need":
                self._arrived(message, known)
            case "setback" if known is not None:
                self._pass_on(message, known.owner)
            case "written" | "failed" if known is not None:
                counts = known.speaker == self.slot and not known.is_over
                copies.over(permit_id, self.slot)
                if counts:
                    self._pass_on(message, known.owner)
                if counts and message["type"] == "failed":
                    copies.forget(permit_id)

    def _arrived(self, message: Message, known: CopiedPermit | None) -> None:
        permit_id = message["id"]
        turn = self._shared.copies.arrived(permit_id, self.slot, time.monotonic())
        if known is None or turn == "unknown":
            self.send({"type": "revoke", "id": permit_id})
        elif turn == "later":
            self._begin(self._compare(permit_id))
        else:
            self._require_that_it_fits(message["bytes"])
            self._needs[permit_id] = message["bytes"]
            self._pass_on(message, known.owner)

    def _require_that_it_fits(self, nbytes: int) -> None:
        most = self._shared.in_flight.most
        if nbytes > most:
            too_large = ConfigError(
                f"sampling.ray.in_flight_bytes: one group of shards takes {nbytes:,} bytes, and "
                f"{most:,} may be on their way (at most three quarters of the object store of "
                "each node); raise it, or lower sampling.shard_samples",
                code="GC110",
            )
            self._shared.refuse(too_large)

    def _say_lost(self, permit_id: str, owner: int, reason: str) -> None:
        error = f"the node that had filled the group is gone: {reason}"
        what = {"disk": False, "set_aside": False, "refused": "", "spent": False}
        self._pass_on({"type": "failed", "id": permit_id, "error": error, **what}, owner)

    def _pass_on(self, message: Message, slot: int) -> None:
        self._shared.send({"type": "said", "message": message, "slot": slot})

    def _tell_supervisor(self, message: Message) -> None:
        self._shared.send({**message, "slot": self.slot})

    # --------------------------------------------------------------------- shards

    async def _transfer(self, permit_id: str, nbytes: int) -> None:
        """Bring the shards of a granted permit to the disk, and report it to the actor."""
        disk = lost = ""
        async with self._shared.in_flight.room(nbytes):
            if self._is_over:
                return
            shards = self._actor.take.remote(permit_id)
            try:
                await self._write(permit_id, shards)
            except RayActorError:
                return  # `_speak` notices its end
            except (RayError, GrowcacheError) as error:
                lost = f"the group was lost on its way from a Ray node: {_short(error)}"
            except OSError as error:
                disk = str(error)
            del shards
        self.send({"type": "delivered", "id": permit_id, "disk": disk, "lost": lost})

    async def _write(self, permit_id: str, shards: Any) -> None:
        sent = await shards  # mapped, not copied
        encoded = [shard.encoded() for shard in sent]
        written = await self._shared.files.deliver(permit_id, encoded)
        self._note_outcome(permit_id, [ShardOutcome.of(sidecar) for sidecar in written])

    async def _compare(self, permit_id: str) -> None:
        """Compare a copy that arrived too late with the written shards."""
        with suppress(RayError):
            self._note_outcome(permit_id, await self._actor.outcome.remote(permit_id))
            self.send({"type": "delivered", "id": permit_id, "disk": "", "lost": ""})

    def _note_outcome(self, permit_id: str, outcome: list[ShardOutcome]) -> None:
        shared = self._shared
        if found := shared.copies.compared(permit_id, self.slot, outcome):
            other, shards = found
            differing = SamplingError(
                f"two copies of shard {shards[0]} have different bytes, one made on "
                f"{shared.nodes[self.slot]}, the other on {shared.nodes[other]}: is "
                "sampling.transform or source.format not a function of its arguments, or did an "
                "object change?",
                code="GC506",
            )
            shared.refuse(differing)


def _actor(config: RayConfig) -> Any:
    remote: Any = ray.remote  # its types lack concurrency groups
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
    """Return one of Ray's errors as one line, without the advice."""
    text = " ".join(str(error).split())
    return (
        text if len(text) <= MAX_REASON_CHARACTERS else text[: MAX_REASON_CHARACTERS - 1] + "…"
    )
