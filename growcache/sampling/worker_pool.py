"""The samplers of a service: start, watch, restart with back-off, stop."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from growcache.cache.status import WorkerStatus
from growcache.config import Config
from growcache.errors import SamplingError
from growcache.formats import is_user_format
from growcache.sampling.engines.local import SamplerProcess
from growcache.sampling.messages import Message


def crash_suspects(config: Config) -> str:
    """Ask what may have ended a sampler: the user's code, as far as there is any."""
    named = [config.sampling.transform]
    for form, options in [one for source in config.sources for one in source.formats]:
        named += [str(options.get("decode")), form]
    code = " or ".join(dict.fromkeys(name for name in named if name and is_user_format(name)))
    return "; " + (f"does {code} crash, or " if code else "") + "is there too little memory?"


FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 30.0
HEARD_SECONDS = 3.0  # samplers tell of a long call every second, unless it keeps the GIL
HEALTHY_SECONDS = 10.0  # a sampler that lived so long starts again without delay
MOST_SUSPICION = 15  # of one piece of work: 15 samplers killed on it, or 3 crashes
PERMITS_EACH = 2  # one is fetched while the other is encoded and written
MOST_PERMITS = 4  # where groups have so few visits that two are not all the reads in flight


@dataclass(frozen=True, slots=True)
class SamplerDeath:
    """How a sampler ended."""

    code: int
    stalled: str | None = None

    @property
    def suspicion(self) -> int:
        """How much it says against the work of the sampler.

        A SIGKILL may be the kernel's, for want of memory, or just somebody's; any other end
        is most likely of the work's own making.
        """
        somebodys = self.code == -signal.SIGKILL and self.stalled is None
        return 1 if somebodys else MOST_SUSPICION // 3

    def __str__(self) -> str:
        if self.stalled is not None:
            return self.stalled
        if -self.code in set(signal.Signals):
            return f"by {signal.Signals(-self.code).name}"
        return f"with exit code {self.code}"


@dataclass(slots=True)
class AssignedPermit:
    visits: int
    done: int = 0


@dataclass(slots=True)
class WorkerSlot:
    """One place for a sampler; a restarted one keeps its place."""

    id: int
    process: SamplerProcess | None = None
    ready: bool = False
    permits: dict[str, AssignedPermit] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    progress_at: float = 0.0  # monotonic seconds
    calls: int = 0
    call: tuple[float, str] = (0.0, "")
    stalled: str | None = None
    restarts: int = 0
    probing: bool = False
    failed_starts: int = 0  # in a row

    def has_room(self, concurrency: int) -> bool:
        """Whether it can take one more permit.

        Two are enough where each has as many visits as there may be reads in flight; of smaller
        ones it takes enough to have as many in flight while the largest is written.
        """
        visits = [work.visits for work in self.permits.values()]
        most = (
            PERMITS_EACH
            if sum(visits) - max(visits, default=0) >= concurrency
            else MOST_PERMITS
        )
        return self.ready and len(visits) < most

    def has_room_for_wishes(self, concurrency: int) -> bool:
        """Whether it can take one more permit for what a reader wishes for.

        One more than usual where all the others wait for room: that may only come when this
        reader goes on.
        """
        waits = PERMITS_EACH <= len(self.paused) == len(self.permits) <= MOST_PERMITS
        return self.has_room(concurrency) or (self.ready and waits)

    def forget(self, permit: str) -> bool:
        """Forget a permit; False if it had none of this name."""
        self.paused.discard(permit)
        return self.permits.pop(permit, None) is not None

    def send(self, message: Message) -> None:
        if self.process is not None:
            self.process.send(message)

    def note_progress(self) -> None:
        self.progress_at = time.monotonic()

    def note_user_call(self, ended: int, call: str) -> None:
        """Note what it says about the user's code: calls that end are progress."""
        if ended != self.calls:
            self.note_progress()
        self.calls, self.call = ended, (time.monotonic(), call)

    def is_stalled(self, now: float, timeout_seconds: float) -> bool:
        """Whether it should have made progress for longer than it is allowed."""
        busy = len(self.permits) > len(self.paused) or not self.ready or self.probing
        return self.process is not None and busy and now - self.progress_at > timeout_seconds

    def kill_stalled(self, now: float) -> str:
        """Kill it for its idleness; return that in words."""
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
        return WorkerStatus(
            self.id, self.process.pid if self.process else None, state, permit, done
        )


class WorkerPool:
    """All slots. Each slot's life is one task: start, wait for the end, back off, again."""

    def __init__(
        self,
        count: int,
        setup: Message,
        on_message: Callable[[WorkerSlot, Message], None],
        on_death: Callable[[WorkerSlot, list[str], SamplerDeath], None],
        on_failure: Callable[[Exception], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> None:
        self.slots = [WorkerSlot(number) for number in range(count)]
        self._setup = setup
        self._on_message = on_message
        self._on_death = on_death
        self._on_failure = on_failure
        self._on_stderr = on_stderr
        self._stopping = False
        self._lives = [asyncio.create_task(self._keep_running(slot)) for slot in self.slots]
        for life in self._lives:
            life.add_done_callback(self._life_ended)

    @property
    def alive(self) -> int:
        return sum(1 for slot in self.slots if slot.process is not None)

    @property
    def restarts(self) -> int:
        return sum(slot.restarts for slot in self.slots)

    def adopt(self, setup: Message) -> None:
        self._setup = setup

    def broadcast(self, message: Message) -> None:
        """Send a message to every sampler that is ready."""
        for slot in self.slots:
            if slot.ready:
                slot.send(message)

    def kill_stalled(self, timeout_seconds: float) -> list[str]:
        """Kill samplers without progress; return what there is to say about each."""
        now = time.monotonic()
        return [
            f"sampler {slot.id} was restarted {slot.kill_stalled(now)}"
            for slot in self.slots
            if slot.is_stalled(now, timeout_seconds)
        ]

    async def stop(self) -> None:
        """End all samplers, at the same time, and wait for them."""
        self._stopping = True
        running = [slot.process for slot in self.slots if slot.process is not None]
        await asyncio.gather(*(process.stop() for process in running))
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        error = None if life.cancelled() else life.exception()
        if isinstance(error, OSError):
            self._on_failure(SamplingError(f"cannot start a sampler process: {error}"))
        elif isinstance(error, Exception):
            self._on_failure(error)

    async def _keep_running(self, slot: WorkerSlot) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._stopping:
            born = time.monotonic()
            slot.process = await SamplerProcess.start(
                lambda message: self._on_message(slot, message), self._on_stderr
            )
            slot.note_progress()
            slot.send(self._setup)
            code = await slot.process.ended()
            self._note_end(slot, code)
            if self._stopping:
                return
            healthy = time.monotonic() - born > HEALTHY_SECONDS
            backoff = (
                FIRST_BACKOFF_SECONDS if healthy else min(LONGEST_BACKOFF_SECONDS, 2 * backoff)
            )
            await asyncio.sleep(backoff)
            slot.restarts += 1

    def _note_end(self, slot: WorkerSlot, code: int) -> None:
        permits = list(slot.permits)
        slot.failed_starts = 0 if slot.ready else slot.failed_starts + 1
        death = SamplerDeath(code, slot.stalled)
        slot.process, slot.ready, slot.probing = None, False, False
        slot.stalled, slot.calls, slot.call = None, 0, (0.0, "")
        slot.permits.clear()
        slot.paused.clear()
        if not self._stopping:
            self._on_death(slot, permits, death)
