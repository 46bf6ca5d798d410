"""The samplers of a service: start, watch, restart with back-off, stop. An engine runs them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from growcache.cache.status_model import WorkerStatus
from growcache.config import Config
from growcache.errors import SamplingError
from growcache.formats import is_user_format
from growcache.sampling.engines import Engine, RunningSampler, SamplerEnd
from growcache.sampling.messages import Message
from growcache.sampling.rate_limiter import reads_wanted


def crash_suspects(config: Config) -> str:
    named = [config.sampling.transform]
    for form, options in [one for source in config.sources for one in source.formats]:
        named += [str(options.get("decode")), form]
    code = " or ".join(dict.fromkeys(name for name in named if name and is_user_format(name)))
    return "; " + (f"does {code} crash, or " if code else "") + "is there too little memory?"


FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 30.0
HEARD_SECONDS = 3.0  # samplers report a long call every second, unless it holds the GIL
HEALTHY_SECONDS = 10.0  # after which a sampler restarts without delay
MOST_SUSPICION = 15  # of one group: 15 killed samplers, or 3 crashes
PERMITS_EACH = 2  # one is fetched while the other is encoded and written
MOST_PERMITS = 4  # if two groups have fewer visits than reads may be in flight


MEMORY_SHARE = 8  # 1/8 of the machine's memory is for groups with slow reads


def group_memory_bytes(config: Config, machine_bytes: int) -> int:
    """Return the bytes for one sampler's groups if it works on more than usual (protocol 10)."""
    workers = config.sampling.samplers
    of_bound = int(config.cache.max_bytes) // (workers + 2)
    return min(of_bound, machine_bytes // (MEMORY_SHARE * workers))


@dataclass(frozen=True, slots=True)
class SamplerDeath:
    code: int
    stalled: str | None = None
    reason: str = ""  # in words, if an engine knows more than the code

    @property
    def suspicion(self) -> int:
        """How much the end speaks against the work.

        A SIGKILL may come from the kernel or an operator. The work is the most likely cause of
        other ends.
        """
        may_be_external = self.code == -signal.SIGKILL and self.stalled is None
        return 1 if may_be_external else MOST_SUSPICION // 3

    def __str__(self) -> str:
        if self.stalled is not None:
            return self.stalled
        if self.reason:
            return f"({self.reason})"
        if -self.code in set(signal.Signals):
            return f"by {signal.Signals(-self.code).name}"
        return f"with exit code {self.code}"


@dataclass(slots=True)
class AssignedPermit:
    visits: int
    done: int = 0
    nbytes: int = 0  # estimated

    @property
    def left(self) -> int:
        """Number of visits that have not ended; 0 if the group is being encoded and written."""
        return self.visits - self.done


@dataclass(slots=True)
class SamplerSlot:
    """One place for a sampler, which a restarted sampler keeps."""

    id: int
    process: RunningSampler | None = None
    ready: bool = False
    permits: dict[str, AssignedPermit] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    progress_at: float = 0.0  # monotonic seconds
    calls: int = 0
    call: tuple[float, str] = (0.0, "")
    stalled: str | None = None
    restarts: int = 0
    probing: bool = False
    reads: list[int] = field(default_factory=list)  # reads in flight that it was allowed
    failed_starts: int = 0  # consecutive

    def has_room(self, concurrency: int, memory_bytes: int = 0) -> bool:
        """Whether it may take one more permit.

        Small permits need more than two, so that reads continue while the largest is written.
        Slow reads of older groups must not delay those of others, within ``memory_bytes`` for
        all.
        """
        visits = [work.visits for work in self.permits.values()]
        most = (
            PERMITS_EACH
            if sum(visits) - max(visits, default=0) >= concurrency
            else MOST_PERMITS
        )
        usual = len(visits) < most
        return self.ready and (usual or self._reads_too_little(concurrency, memory_bytes))

    def _reads_too_little(self, concurrency: int, memory_bytes: int) -> bool:
        permits = self.permits.values()
        largest = max((work.nbytes for work in permits), default=0)
        if sum(work.nbytes for work in permits) + largest >= memory_bytes:
            return False
        written = sum(not work.left for work in permits)  # the disk is slow
        return written < PERMITS_EACH and self.visits_left <= reads_wanted(concurrency)

    @property
    def visits_left(self) -> int:
        return sum(work.left for work in self.permits.values())

    def has_room_for_refetch(self, concurrency: int, memory_bytes: int = 0) -> bool:
        """Whether it may take a permit for a refetch.

        One more is allowed if all others wait for room, because that may depend on the waiting
        reader.
        """
        waits = PERMITS_EACH <= len(self.paused) == len(self.permits) <= MOST_PERMITS
        return self.has_room(concurrency, memory_bytes) or (self.ready and waits)

    @property
    def only_waits(self) -> bool:
        return self.ready and len(self.paused) == len(self.permits)

    def forget(self, permit_id: str) -> bool:
        self.paused.discard(permit_id)
        return self.permits.pop(permit_id, None) is not None

    def send(self, message: Message) -> None:
        if self.process is not None:
            self.process.send(message)

    def answer_booking(self, may_begin: bool) -> None:
        self.send({"type": "booked", "may_begin": may_begin})

    def note_progress(self) -> None:
        self.progress_at = time.monotonic()

    def note_user_call(self, ended: int, call: str) -> None:
        """Record the user's calls. A call that ends is progress."""
        if ended != self.calls:
            self.note_progress()
        self.calls, self.call = ended, (time.monotonic(), call)

    def is_stalled(self, now: float, timeout_seconds: float) -> bool:
        busy = len(self.permits) > len(self.paused) or not self.ready or self.probing
        return self.process is not None and busy and now - self.progress_at > timeout_seconds

    def kill_stalled(self, now: float) -> str:
        assert self.process is not None
        said_at, call = self.call
        heard = call and now - said_at < HEARD_SECONDS
        self.stalled = f"after {now - self.progress_at:.0f} s " + (
            f"in one call of {call}; make it faster, or raise sampling.timeout_seconds"
            if heard
            else "without progress"
        )
        self.process.kill()
        self.note_progress()
        return self.stalled

    def status(self) -> WorkerStatus:
        permit = next(iter(self.permits), None)
        state = "restarting" if self.process is None else "starting"
        if self.ready:
            working = [p for p in self.permits if p not in self.paused]
            permit = working[0] if working else permit
            state = "reading" if working else "waiting" if self.permits else "idle"
        done = self.permits[permit].done if permit else 0
        pid = self.process.pid if self.process else None
        node = self.process.node if self.process else None
        return WorkerStatus(self.id, pid, state, permit, done, node=node)


class SamplerPool:
    """The samplers. Each slot's life is one task: start, wait for the end, back off, repeat."""

    def __init__(
        self,
        engines: Sequence[tuple[Engine, int]],
        setup: Message,
        on_message: Callable[[SamplerSlot, Message], None],
        on_death: Callable[[SamplerSlot, list[str], SamplerDeath], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Prepare the slots. ``engines`` has each engine with its number of samplers."""
        self._engines = [engine for engine, _ in engines]
        by_slot = [engine for engine, count in engines for _ in range(count)]
        self.slots = [SamplerSlot(number) for number in range(len(by_slot))]
        self.setup = setup
        self._on_message = on_message
        self._on_death = on_death
        self._on_failure = on_failure
        self._stopping = False
        self._lives = [
            asyncio.create_task(self._keep_running(slot, engine))
            for slot, engine in zip(self.slots, by_slot, strict=True)
        ]
        for life in self._lives:
            life.add_done_callback(self._life_ended)

    @property
    def alive(self) -> int:
        return sum(1 for slot in self.slots if slot.process is not None)

    @property
    def waiting_for(self) -> str:
        """The event that samplers need to start, in words."""
        return next(filter(None, (engine.waiting_for for engine in self._engines)), "")

    @property
    def restarts(self) -> int:
        return sum(slot.restarts for slot in self.slots)

    def broadcast(self, message: Message) -> None:
        for slot in self.slots:
            if slot.ready:
                slot.send(message)

    def kill_stalled(self, timeout_seconds: float) -> list[str]:
        now = time.monotonic()
        return [
            f"sampler {slot.id} was restarted {slot.kill_stalled(now)}"
            for slot in self.slots
            if slot.is_stalled(now, timeout_seconds)
        ]

    async def stop(self) -> None:
        self._stopping = True
        running = [slot.process for slot in self.slots if slot.process is not None]
        await asyncio.gather(*(process.stop() for process in running))
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        error = None if life.cancelled() else life.exception()
        if isinstance(error, OSError):
            self._on_failure(
                SamplingError(f"cannot start a sampler process: {error}", code="GC504")
            )
        elif isinstance(error, Exception):
            self._on_failure(error)

    async def _keep_running(self, slot: SamplerSlot, engine: Engine) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._stopping:
            slot.process = await engine.start(
                slot.id, lambda message: self._on_message(slot, message)
            )
            born = time.monotonic()
            slot.note_progress()
            slot.send(self.setup)
            self._note_end(slot, await slot.process.ended())
            if self._stopping:
                return
            healthy = time.monotonic() - born > HEALTHY_SECONDS
            backoff = (
                FIRST_BACKOFF_SECONDS if healthy else min(LONGEST_BACKOFF_SECONDS, 2 * backoff)
            )
            await asyncio.sleep(backoff)
            slot.restarts += 1

    def _note_end(self, slot: SamplerSlot, end: SamplerEnd) -> None:
        permits = list(slot.permits)
        slot.failed_starts = 0 if slot.ready else slot.failed_starts + 1
        death = SamplerDeath(end.code, slot.stalled, end.reason)
        slot.process, slot.ready, slot.probing = None, False, False
        slot.stalled, slot.calls, slot.call = None, 0, (0.0, "")
        slot.permits.clear()
        slot.reads = []
        slot.paused.clear()
        if not self._stopping:
            self._on_death(slot, permits, death)
