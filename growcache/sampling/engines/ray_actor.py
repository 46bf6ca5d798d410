"""A sampler as an actor of a Ray cluster.

The sampler itself is that of `growcache.sampling.sampler`, in a thread with its own event loop.
The writer (`ray_writer`) calls the methods. Each has its own thread, so that none waits for
another.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import uvloop

from growcache.cache.formats.encoding import EncodedFile
from growcache.cache.formats.mapped import Bytes
from growcache.cache.incoming import ShardChecksum
from growcache.cache.sidecar import Sidecar
from growcache.errors import GrowcacheError, TransientStoreError
from growcache.sampling.engines.library_versions import installed_versions
from growcache.sampling.engines.permit_copies import ShardOutcome
from growcache.sampling.engines.sent_code import SentCode
from growcache.sampling.fill import EncodedShard
from growcache.sampling.messages import Message, refusal_message
from growcache.sampling.sampler import Sampler, config_of, watch_calls

# The threads of an actor, by task.
CONCURRENCY_GROUPS = {"tell": 1, "hear": 1, "take": 4}


@dataclass(frozen=True, slots=True)
class SentShard:
    """A shard in Ray's object store.

    Its files are arrays, which a reader maps without copying.
    """

    sidecar: bytes
    files: list[tuple[str, bool, Bytes]]  # suffix, whether guarded, content

    @classmethod
    def of(cls, shard: EncodedShard) -> SentShard:
        files = [(file.suffix, file.guarded, _joined(file)) for file in shard.files]
        return cls(shard.sidecar.to_bytes(), files)

    def encoded(self) -> EncodedShard:
        files = [
            EncodedFile(suffix, len(content), [content], guarded)
            for suffix, guarded, content in self.files
        ]
        return EncodedShard(Sidecar.from_bytes(self.sidecar, "a shard of a Ray actor"), files)

    def outcome(self) -> ShardOutcome:
        shard, checksum = self.encoded(), ShardChecksum()
        for file in shard.files:
            deque(checksum.passing(file), maxlen=0)
        return ShardOutcome.of(checksum.on(shard.sidecar))


def _joined(file: EncodedFile) -> Bytes:
    whole: Bytes = np.empty(file.nbytes, np.uint8)
    end = 0
    for piece in file.pieces:
        start, end = end, end + len(piece)
        whole[start:end] = np.frombuffer(piece, np.uint8)
    return whole


class Handover:
    """Shards on their way to the writer. `deliver` ends after they are on the cache's disk."""

    def __init__(self) -> None:
        self._taken: dict[str, Future[list[SentShard]]] = {}
        self._written: dict[str, asyncio.Future[None]] = {}

    async def deliver(self, permit_id: str, shards: Sequence[EncodedShard]) -> None:
        written = self._written[permit_id] = asyncio.get_running_loop().create_future()
        try:
            sent = await asyncio.to_thread(lambda: list(map(SentShard.of, shards)))
            self._taken[permit_id].set_result(sent)
            await written
        finally:
            del self._written[permit_id]

    def open(self, permit_id: str) -> Future[list[SentShard]]:
        return self._taken.setdefault(permit_id, Future())

    def close(self, permit_id: str) -> None:
        del self._taken[permit_id]

    def note_written(self, message: Message) -> None:
        written = self._written.get(message["id"])
        if written is None or written.done():
            return
        if message["disk"]:
            written.set_exception(OSError(message["disk"]))
        elif message["lost"]:
            written.set_exception(TransientStoreError(message["lost"]))
        else:
            written.set_result(None)


class SamplerActor:
    def __init__(self) -> None:
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._early: dict[int, Message] = {}
        self._told = 0
        self._loop = uvloop.new_event_loop()
        self._handover = Handover()
        self._sampler: Sampler | None = None

    @ray.method(concurrency_group="tell")
    def introduce(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "versions": installed_versions(),
        }

    @ray.method(concurrency_group="tell")
    def begin(self, setup: Message, code: SentCode) -> None:
        """Start the sampler, which then reports that it is ready, or refused."""
        threading.Thread(target=self._run, args=(setup, code), daemon=True).start()

    @ray.method(concurrency_group="tell")
    def tell(self, number: int, message: Message) -> None:
        """Accept a message. Ray does not keep the order of calls, so messages are numbered."""
        self._early[number] = message
        while (next_one := self._early.pop(self._told, None)) is not None:
            self._told += 1
            self._loop.call_soon_threadsafe(self._receive, next_one)

    @ray.method(concurrency_group="hear")
    def hear(self) -> list[Message]:
        """Return the next messages of the sampler, which sends some every second."""
        found = [self._outbox.get()]
        while not self._outbox.empty():
            found.append(self._outbox.get())
        return found

    @ray.method(concurrency_group="take")
    def take(self, permit_id: str) -> list[SentShard]:
        """Grant a permit, and return its shards."""
        return self._granted(permit_id)

    @ray.method(concurrency_group="take")
    def outcome(self, permit_id: str) -> list[ShardOutcome]:
        """Grant a permit whose other copy was written, and return only values to compare."""
        return [shard.outcome() for shard in self._granted(permit_id)]

    def _granted(self, permit_id: str) -> list[SentShard]:
        shards = self._handover.open(permit_id)
        self._loop.call_soon_threadsafe(
            self._inbox.put_nowait, {"type": "grant", "id": permit_id}
        )
        try:
            return shards.result()
        finally:
            self._handover.close(permit_id)

    @ray.method(concurrency_group="take")
    def finish(self) -> None:
        """Report the last reads, because budgets count every byte."""
        if self._sampler is not None:
            self._sampler.report()
        self._outbox.put({"type": "finished"})

    def _receive(self, message: Message) -> None:
        if message["type"] == "delivered":
            self._handover.note_written(message)
        else:
            self._inbox.put_nowait(message)

    def _run(self, setup: Message, code: SentCode) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(setup, code))
        except BaseException:  # noqa: BLE001 - after a defect the actor ends
            traceback.print_exc()
            os._exit(1)

    async def _serve(self, setup: Message, code: SentCode) -> None:
        send = self._outbox.put
        try:
            with code.adopted():
                sampler = self._sampler = Sampler(config_of(setup), send, self._handover)
        except GrowcacheError as error:
            send(refusal_message(error))
            return
        threading.Thread(target=watch_calls, args=(send,), daemon=True).start()
        send(sampler.introduction())
        await sampler.serve(self._inbox)
