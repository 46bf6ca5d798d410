"""The sampler processes of a service: start, watch, restart with back-off, stop.

They start as ``python -m growcache sampler``, never by fork or multiprocessing, so that the
user's script needs no ``__main__`` guard. Each has its own session, so that a terminal's Ctrl-C
reaches only the supervisor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from growcache.cache.status import WorkerStatus
from growcache.config import Config
from growcache.errors import SamplingError
from growcache.formats import is_user_format
from growcache.sampling.messages import Message, pack, unpack
from growcache.sampling.rate_limiter import reads_wanted
from growcache.usercode import child_environment

LINE_BYTES = 1 << 24
STDERR_BYTES = 1 << 16
ENVIRONMENT = {
    # One thread for the client's own runtime: more of them only fight with the event loop,
    # and cost a third more CPU per byte.
    "TOKIO_WORKER_THREADS": "1",
    # Samplers are the parallelism; idle BLAS threads spin for 50 ms at every start.
    "OPENBLAS_NUM_THREADS": "1",
    # Objects come and go all the time. glibc would give their memory back to the kernel and
    # have it cleared anew for the next ones, which costs as much as reading the socket.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the highest it takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
STDERR_SECONDS = 0.5  # after a child's end, to read its error stream
STOP_SECONDS = (3.0, 3.0, 10.0)  # after closing the pipe, after SIGTERM, after SIGKILL


class SamplerProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        on_message: Callable[[Message], None],
        stderr: StderrPipe | None,
    ) -> None:
        self._process = process
        self._stderr = stderr
        self._reading = asyncio.ensure_future(self._read(on_message))

    @classmethod
    async def start(
        cls,
        on_message: Callable[[Message], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> SamplerProcess:
        stderr = None if on_stderr is None else await StderrPipe.open(on_stderr)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "growcache",
                "sampler",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None if stderr is None else stderr.write_end,
                limit=LINE_BYTES,
                start_new_session=True,
                env={**ENVIRONMENT, **child_environment()},
            )
        except BaseException:
            if stderr is not None:
                stderr.close()
            raise
        finally:
            if stderr is not None:
                os.close(stderr.write_end)
        return cls(process, on_message, stderr)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """A message to a dead child is lost, and `ended` reports the death."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(pack(message))

    async def ended(self) -> int:
        """Return the exit code once the child is gone and its output is read."""
        await self._reading
        code = await self._process.wait()
        await self._finish_stderr()
        return code

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Close the pipe, then ask, then kill; return when the child is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        for seconds, escalate in zip(
            STOP_SECONDS, (self._process.terminate, self._process.kill, None), strict=True
        ):
            try:
                await asyncio.wait_for(asyncio.shield(self._process.wait()), seconds)
            except TimeoutError:
                if escalate is not None:
                    escalate()
            else:
                break
        await self._reading
        await self._finish_stderr()

    async def _finish_stderr(self) -> None:
        if self._stderr is not None:
            await self._stderr.finish()

    async def _read(self, on_message: Callable[[Message], None]) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.endswith(b"\n"):  # a child killed while it spoke leaves half a line
                on_message(unpack(line))


class StderrPipe:
    """A child's error stream, passed on in whole lines.

    It is not a pipe of asyncio's process, because that counts as alive until the pipe is
    closed, and a child of the user's code may outlive the sampler.
    """

    def __init__(
        self, write_end: int, reader: asyncio.StreamReader, transport: asyncio.ReadTransport
    ) -> None:
        self.write_end = write_end
        self._reader = reader
        self._transport = transport
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, on_stderr: Callable[[bytes], None]) -> StderrPipe:
        """The caller closes ``write_end`` once a child has it."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        read_end, write_end = os.pipe()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        pipe = cls(write_end, reader, transport)
        pipe._task = asyncio.ensure_future(pipe._pass_on(on_stderr))
        return pipe

    async def finish(self) -> None:
        """Pass on what is left, and close the pipe, although a grandchild may still hold it."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=STDERR_SECONDS)
        self.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._transport.close()

    async def _pass_on(self, on_stderr: Callable[[bytes], None]) -> None:
        rest = b""
        while chunk := await self._reader.read(STDERR_BYTES):
            lines, end, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > STDERR_BYTES:  # a line without end, such as a progress bar
                lines, end, rest = lines + end + rest, b"\n", b""
            if end:
                on_stderr(lines + end)
        if rest:
            on_stderr(rest + b"\n")


def crash_suspects(config: Config) -> str:
    named = [config.sampling.transform]
    for form, options in [one for source in config.sources for one in source.formats]:
        named += [str(options.get("decode")), form]
    code = " or ".join(dict.fromkeys(name for name in named if name and is_user_format(name)))
    return "; " + (f"does {code} crash, or " if code else "") + "is there too little memory?"


FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 30.0
HEARD_SECONDS = 3.0  # samplers report a long call every second, unless it holds the GIL
HEALTHY_SECONDS = 10.0  # after that a sampler restarts without delay
MOST_SUSPICION = 15  # of one group: 15 samplers killed on it, or 3 crashes
PERMITS_EACH = 2  # one is fetched while the other is encoded and written
MOST_PERMITS = 4  # where two groups have fewer visits than reads may be in flight


MEMORY_SHARE = 8  # 1/8 of the machine's memory may hold groups whose slow reads are awaited


def group_memory_bytes(config: Config, machine_bytes: int) -> int:
    """Return what the groups of one sampler may take, where it works on more than usual (protocol 10)."""
    workers = config.sampling.workers
    of_bound = int(config.cache.max_bytes) // (workers + 2)
    return min(of_bound, machine_bytes // (MEMORY_SHARE * workers))


@dataclass(frozen=True, slots=True)
class SamplerDeath:
    code: int
    stalled: str | None = None

    @property
    def suspicion(self) -> int:
        """A SIGKILL may be the kernel's or an operator's; the work most likely causes other ends."""
        may_be_external = self.code == -signal.SIGKILL and self.stalled is None
        return 1 if may_be_external else MOST_SUSPICION // 3

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
    nbytes: int = 0  # estimated

    @property
    def left(self) -> int:
        """Visits that have not ended; none where the group is encoded and written."""
        return self.visits - self.done


@dataclass(slots=True)
class SamplerSlot:
    """One place for a sampler; a restarted sampler keeps it."""

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
    reads: list[int] = field(default_factory=list)  # that it was told it may have in flight
    failed_starts: int = 0  # in a row

    def has_room(self, concurrency: int, memory_bytes: int = 0) -> bool:
        """Whether it may take one more permit.

        Small permits need more than two, so that reads go on while the largest is written. Slow
        reads of older groups must not hold up those of others, within ``memory_bytes`` for all.
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
        written = sum(not work.left for work in permits)  # the disk is what is slow
        return written < PERMITS_EACH and self.visits_left <= reads_wanted(concurrency)

    @property
    def visits_left(self) -> int:
        return sum(work.left for work in self.permits.values())

    def has_room_for_refetch(self, concurrency: int, memory_bytes: int = 0) -> bool:
        """One more where all others wait for room, which may come only when the reader goes on."""
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
        """A call that ends is progress."""
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
        return WorkerStatus(
            self.id, self.process.pid if self.process else None, state, permit, done
        )


class SamplerPool:
    """Each slot's life is one task: start, wait for the end, back off, repeat."""

    def __init__(
        self,
        count: int,
        setup: Message,
        on_message: Callable[[SamplerSlot, Message], None],
        on_death: Callable[[SamplerSlot, list[str], SamplerDeath], None],
        on_failure: Callable[[Exception], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> None:
        self.slots = [SamplerSlot(number) for number in range(count)]
        self.setup = setup
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

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        error = None if life.cancelled() else life.exception()
        if isinstance(error, OSError):
            self._on_failure(SamplingError(f"cannot start a sampler process: {error}"))
        elif isinstance(error, Exception):
            self._on_failure(error)

    async def _keep_running(self, slot: SamplerSlot) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._stopping:
            born = time.monotonic()
            slot.process = await SamplerProcess.start(
                lambda message: self._on_message(slot, message), self._on_stderr
            )
            slot.note_progress()
            slot.send(self.setup)
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

    def _note_end(self, slot: SamplerSlot, code: int) -> None:
        permits = list(slot.permits)
        slot.failed_starts = 0 if slot.ready else slot.failed_starts + 1
        death = SamplerDeath(code, slot.stalled)
        slot.process, slot.ready, slot.probing = None, False, False
        slot.stalled, slot.calls, slot.call = None, 0, (0.0, "")
        slot.permits.clear()
        slot.reads = []
        slot.paused.clear()
        if not self._stopping:
            self._on_death(slot, permits, death)
