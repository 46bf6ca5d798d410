"""A sampler: the child process ``python -m growcache sampler``.

It has no state. Permits arrive on standard input, shards are written to ``incoming/``, and
reports leave on standard output. Only the supervisor has the other ends. So the end of the
input means that the supervisor died, and also ends the sampler.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import uvloop

from growcache.cache.formats import CACHE_FORMATS
from growcache.config import Config, SamplingConfig
from growcache.config_text import from_json_value
from growcache.errors import (
    BudgetSpentError,
    ConfigError,
    CredentialsError,
    GrowcacheError,
    StoreRefusedError,
    TransientStoreError,
)
from growcache.sampling.byte_budget import ReadBookings
from growcache.sampling.delivery import Delivery, IncomingFiles
from growcache.sampling.fill import (
    WEIGHT,
    EncodedShard,
    GroupFiller,
    SampleTransform,
    encode_group,
    load_transform,
    none_came,
)
from growcache.sampling.messages import (
    FORMAT,
    TRANSFORM,
    Message,
    PartVisit,
    Permit,
    awaited_event,
    pack,
    refusal_message,
    unpack,
)
from growcache.sampling.rate_limiter import reads_wanted
from growcache.sampling.sampler_counts import SamplerCounts, hole_kinds
from growcache.sampling.sampler_memory import GroupLimits
from growcache.sampling.schema_probe import SchemaProbe
from growcache.sampling.sources import open_sources
from growcache.schema import Schema
from growcache.usercode import RUNNING_CALLS

PROGRESS_SECONDS = 0.2
CALLS_SECONDS = 1.0  # between two looks at the user's code


Send: TypeAlias = Callable[[Message], None]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
    # The user's code may print, which must not mix with the messages.
    messages = os.dup(1)
    os.dup2(2, 1)
    uvloop.run(_serve(messages))


async def _serve(messages: int) -> None:
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    first = sys.stdin.buffer.readline()
    if not first:
        return
    line = ReportPipe(messages)
    try:
        config = config_of(unpack(first))
        sampler = Sampler(config, line.send, IncomingFiles(config.cache))
    except GrowcacheError as error:
        line.send(refusal_message(error))
        return
    # In a thread, because a busy transform must not keep a sampler alive after its supervisor.
    threading.Thread(target=_listen, args=(loop, inbox, sampler.report), daemon=True).start()
    threading.Thread(target=watch_calls, args=(line.send,), daemon=True).start()
    line.send(sampler.introduction())
    try:
        await sampler.serve(inbox)
    finally:  # only a defect leads here; the reading thread would block an orderly end
        traceback.print_exc()
        os._exit(1)


def _listen(
    loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Message], report: Callable[[], None]
) -> None:
    for text in sys.stdin.buffer:
        loop.call_soon_threadsafe(inbox.put_nowait, unpack(text))
    try:
        report()  # because budgets count every byte
    finally:
        os._exit(0)  # without its supervisor, work in progress is useless


class ReportPipe:
    def __init__(
        self, descriptor: int, on_broken: Callable[[], None] = lambda: os._exit(0)
    ) -> None:
        """Write to a descriptor. ``on_broken`` is called if the supervisor has died."""
        self._descriptor = descriptor
        self._on_broken = on_broken
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one complete message."""
        data = memoryview(pack(message))
        try:
            with self._lock:
                while data:
                    data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            self._on_broken()


def watch_calls(send: Send) -> None:
    """Report the calls of the user's code, even while it blocks the event loop."""
    ended = 0
    while True:
        time.sleep(CALLS_SECONDS)
        longest = RUNNING_CALLS.longest()
        call = longest[1] if longest and longest[0] >= CALLS_SECONDS else ""
        if call or RUNNING_CALLS.ended != ended:
            ended = RUNNING_CALLS.ended
            send({"type": "called", "ended": ended, "call": call})


@dataclass(slots=True)
class Progress:
    nbytes: int = 0
    retries: int = 0
    last_error: str = ""
    parts: dict[str, int] = field(default_factory=dict)
    visits_left: int = 0  # of all permits

    def take_message(self) -> Message:
        found = {"nbytes": self.nbytes, "retries": self.retries, "last_error": self.last_error}
        self.nbytes = self.retries = 0
        return {"type": "progress", **found, "parts": dict(self.parts)}


class Sampler:
    """Fills groups as messages request. ``send`` may be called from any thread."""

    def __init__(self, config: Config, send: Send, delivery: Delivery) -> None:
        sampling = config.sampling
        self._send = send
        self._delivery = delivery
        self._cache_format = config.cache.format
        self._seed = sampling.seed
        self._reads_wanted = reads_wanted(sampling.concurrency)
        self._progress = Progress()
        self._counts = SamplerCounts()
        self._bookings = ReadBookings(send)
        self._transform: SampleTransform | None = load_transform(
            sampling.transform, sampling.transform_options, sampling.seed
        )
        self._sources = open_sources(
            config.sources,
            concurrency=sampling.concurrency,
            timeout_seconds=sampling.timeout_seconds,
            on_retry=self._retried,
            on_bytes=self._read,
            without_credentials=True,
            meter=self._bookings,
        )
        if not self._sources.listed:
            _refuse_choices(config)
        self._filler = GroupFiller(
            self._sources,
            self._transform,
            sampling.seed,
            sampling.concurrency,
            weighted=sampling.strata is not None,
        )
        declared = None if sampling.schema == "auto" else _declared_schema(sampling)
        self._schema_probe = SchemaProbe(self._sources, self._filler, sampling.seed, declared)
        self._schema: Schema | None = None
        self._fingerprint = ""
        self._limits: GroupLimits | None = None
        self._grants: dict[str, asyncio.Event] = {}
        self._revoked: set[str] = set()
        self._cuts: dict[str, Sequence[int]] = {}
        self._reporting = threading.Lock()

    def introduction(self) -> Message:
        transform = self._transform.digest if self._transform else None
        digests = {TRANSFORM: transform, FORMAT: self._sources.code_digest}
        return {
            "type": "ready",
            "digests": {name: found and found.syntax for name, found in digests.items()},
            "text_digests": {name: found and found.text for name, found in digests.items()},
            "ranged": [object_format.ranged for object_format in self._sources.formats],
            "listed": self._sources.listed,
            "lengths": self._sources.lengths,
        }

    async def serve(self, inbox: asyncio.Queue[Message]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_progress())
            while True:
                message = await inbox.get()
                match message["type"]:
                    case "probe":
                        visits = [PartVisit.from_values(values) for values in message["visits"]]
                        tasks.create_task(self._probe(visits))
                    case "identity":
                        self._schema = Schema.from_json(message["schema"])
                        if message["follow"] is not None:
                            self._sources.follow_fields(message["follow"])
                        self._fingerprint = message["fingerprint"]
                        self._limits = self._limits_of(
                            message["group_limit_bytes"], message["group_most_bytes"]
                        )
                    case "permit":
                        tasks.create_task(self._fill(Permit.from_message(message)))
                    case "grant" if event := self._grants.get(message["id"]):
                        event.set()
                    case "cut" if event := self._grants.get(message["id"]):
                        self._cuts[message["id"]] = message["lengths"]
                        event.set()
                    case "revoke" if event := self._grants.get(message["id"]):
                        self._revoked.add(message["id"])
                        event.set()
                    case "booked":
                        self._bookings.answered(message["may_begin"])
                    case "budget":
                        self._bookings.is_limited = message["is_limited"]
                    case "reads":
                        self._sources.limit_reads(message["limits"])
                    case "storage":
                        tasks.create_task(self._adopt(message["options"]))

    async def _adopt(self, options: list[dict[str, Any]]) -> None:
        with contextlib.suppress(CredentialsError):  # the next read raises it, and retries
            await asyncio.to_thread(self._sources.set_options, from_json_value(options))

    def _limits_of(self, group_bytes: int | None, most_bytes: int | None) -> GroupLimits | None:
        if group_bytes is None or self._schema is None:
            return None
        largest = CACHE_FORMATS[self._cache_format].largest_sample(self._schema)
        # Earlier caches made no exception for a large sample.
        return GroupLimits(group_bytes, largest, most_bytes or group_bytes)

    async def _fill(self, permit: Permit) -> None:
        self._grants[permit.id] = asyncio.Event()
        self._progress.parts[permit.id] = 0
        self._progress.visits_left += len(permit.visits)
        try:
            with self._counts.timed("fetch"):
                visited = await self._filler.visit_all(
                    permit,
                    self._schema,
                    lambda: self._visited(permit.id),
                    self._limits,
                    lambda place, error: self._set_aside(permit.id, place, error),
                )
            if permit.made_up and none_came(permit, visited):
                self._fail(permit, "every object of it keeps failing", set_aside=True)
                return
            assert self._schema is not None
            encode = partial(
                encode_group,
                permit,
                visited,
                self._schema,
                self._fingerprint,
                self._cache_format,
            )
            if self._transform is not None:
                seconds = sum(visit.transform_seconds for visit in visited)
                self._counts.observe("transform", seconds)
            with self._counts.timed("encode"):
                shards = await asyncio.to_thread(encode)
            while (lengths := await self._ask_for_room(permit, shards)) is not None:
                shards = await asyncio.to_thread(encode, lengths)
            await self._write(permit, shards, hole_kinds(permit, visited))
        except BudgetSpentError as error:
            self._fail(permit, str(error), spent=True)
        except StoreRefusedError as error:
            self._fail(permit, str(error), refused=awaited_event(error))
        except TransientStoreError as error:
            self._fail(permit, str(error))
        except OSError as error:
            self._fail(permit, f"cannot write to the cache: {error}", disk=True)
        finally:
            del self._grants[permit.id]
            self._progress.visits_left -= len(permit.visits) - self._progress.parts.pop(
                permit.id
            )
            self._revoked.discard(permit.id)

    async def _ask_for_room(
        self, permit: Permit, shards: list[EncodedShard]
    ) -> Sequence[int] | None:
        """Wait until the shards may be written; return the lengths to which they must be cut before."""
        needed = sum(shard.needed_bytes for shard in shards)
        # First, because a group that is read does not count as one with slow reads.
        self.report()
        samples = [shard.sidecar.samples for shard in shards]
        self._send({"type": "need", "id": permit.id, "bytes": needed, "samples": samples})
        answered = self._grants[permit.id]
        with self._counts.timed("reserve"):
            await answered.wait()
        lengths = self._cuts.pop(permit.id, None)
        if lengths is not None and permit.id not in self._revoked:
            answered.clear()
        return lengths

    async def _write(
        self, permit: Permit, shards: list[EncodedShard], holes: Mapping[str, Mapping[str, int]]
    ) -> None:
        if permit.id in self._revoked:
            return  # its reader is gone
        with self._counts.timed("write"):
            await self._delivery.deliver(permit.id, shards)
        self.report()  # first, so that budgets count these bytes before the next permit
        self._send({"type": "written", "id": permit.id, "holes": holes})

    def _fail(
        self,
        permit: Permit,
        error: str,
        *,
        disk: bool = False,
        set_aside: bool = False,
        refused: str = "",
        spent: bool = False,
    ) -> None:
        self.report()
        what = {"disk": disk, "set_aside": set_aside, "refused": refused, "spent": spent}
        self._send({"type": "failed", "id": permit.id, "error": error, **what})

    def _set_aside(self, permit_id: str, place: int, error: str) -> None:
        self._send({"type": "setback", "id": permit_id, "place": place, "error": error})

    async def _probe(self, visits: list[PartVisit]) -> None:
        try:
            found = await self._schema_probe.probe(visits)
        except BudgetSpentError as error:
            refusal = f"{error} by a first look at a few objects; raise it"
            found = refusal_message(ConfigError(refusal, code=error.code))
        self.report()
        self._send(found)

    async def _report_progress(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            busy = bool(self._progress.parts) or self._progress.nbytes or self._progress.retries
            if busy or time.monotonic() - last > 1:
                last = time.monotonic()
                self.report()

    def report(self) -> None:
        """Report the progress since the last report, from any thread."""
        with self._reporting:  # so that bytes are reported only once
            unbooked, paced = self._bookings.take_unbooked(), self._bookings.waiting
            progress = self._progress.take_message()
            answers = self._sources.take_answers()
            more = {"unbooked": unbooked, "paced": paced, "answers": answers}
            more["counts"] = self._counts.take()
            self._send({**progress, **more})

    def _visited(self, permit_id: str) -> None:
        self._progress.parts[permit_id] += 1
        self._progress.visits_left -= 1
        if self._progress.visits_left == self._reads_wanted:
            self.report()  # at once, because the next permit is due

    def _read(self, nbytes: int) -> None:
        self._progress.nbytes += nbytes

    def _retried(self, error: BaseException) -> None:
        self._progress.retries += 1
        self._progress.last_error = str(error)


def config_of(setup: Message) -> Config:
    return Config.model_validate(from_json_value(setup["config"]))


def _refuse_choices(config: Config) -> None:
    sections = {
        "a list of sources": len(config.sources) > 1,
        "sampling.weight_by: objects": config.sampling.weight_by == "objects",
        "split": config.split is not None,
        "sampling.strata": config.sampling.strata is not None,
        "source.labels": any(source.labels is not None for source in config.sources),
    }
    for name, is_set in sections.items():
        if is_set:
            drawing = ", ".join(one.format for one in config.sources if ":" in one.format)
            raise ConfigError(
                f"{name} needs objects, but {drawing} draws samples by itself; leave it out",
                code="GC103",
            )


def _declared_schema(sampling: SamplingConfig) -> Schema:
    assert sampling.schema != "auto"
    added = {} if sampling.strata is None else {WEIGHT: ("<f4",)}
    return Schema.declared({**sampling.schema, **added})
