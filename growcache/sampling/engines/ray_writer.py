"""The writer: ``python -m growcache ray-writer``, the only process on this machine that uses Ray.

As Ray's driver it owns the samplers, which are actors, so Ray ends them with it. It relays
their messages, one JSON object per line, and writes their shards into ``incoming/``.

    supervisor -> writer   setup, then: start, stop, kill (of a slot), {"to": slot, "message": …}
    writer -> supervisor   waiting, refused, and of a slot: started, said, ended

The end of the input means that the supervisor is gone, and also ends the writer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NoReturn

import ray

from growcache.config import Config
from growcache.errors import GrowcacheError
from growcache.sampling.delivery import IncomingFiles
from growcache.sampling.engines.cluster_watch import reason_to_reconnect
from growcache.sampling.engines.in_flight import InFlightBytes
from growcache.sampling.engines.library_versions import VersionTable, installed_versions
from growcache.sampling.engines.permit_copies import CopiedPermit, PermitCopies
from growcache.sampling.engines.ray_cluster import connect, in_flight_limit, is_member
from growcache.sampling.engines.ray_link import ActorLink, Shared
from growcache.sampling.engines.sent_code import SentCode, send_code
from growcache.sampling.messages import Message, refusal_message, unpack
from growcache.sampling.sampler import ReportPipe, config_of

COPY_SECONDS = 1.0  # between looks for slow permits
THREADS = 64  # fetch and write shards; some may hang in Ray
LEAVE_SECONDS = 8.0  # for Ray to disconnect
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 15.0
HERE = "this machine"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
    messages = os.dup(1)
    os.dup2(2, 1)  # Ray prints
    setup = sys.stdin.buffer.readline()
    if not setup:
        return
    pipe = ReportPipe(messages, on_broken=lambda: None)  # the input ends as well
    asyncio.run(Writer(unpack(setup), pipe.send).run())


class Writer:
    def __init__(self, setup: Message, send: Callable[[Message], None]) -> None:
        self._setup = {name: value for name, value in setup.items() if name != "folder"}
        self._folder: str | None = setup["folder"]  # for a Ray that the service starts
        self._send = send
        self._config: Config = config_of(setup)
        self._links: dict[int, ActorLink] = {}
        self._connected = False

    async def run(self) -> None:
        """Run without returning.

        The process exits without waiting for threads that hang in Ray.
        """
        try:
            await self._work()
        except BaseException:  # noqa: BLE001 - a defect
            traceback.print_exc()
            self._leave(1)
        self._leave(0)

    async def _work(self) -> None:
        inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._inbox = inbox
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        try:
            code = send_code(self._config)
            files = IncomingFiles(self._config.cache)
        except GrowcacheError as error:
            self._refuse(error)
            return
        await asyncio.to_thread(self._connect)
        self._connected = True
        shared = self._share(code, files)
        tasks = [self._copy_slow_permits(shared.copies), self._leave_a_lost_cluster(shared)]
        running = [asyncio.create_task(task) for task in tasks]
        while (message := await inbox.get()) is not None:
            self._react(message, shared)
        for task in running:
            task.cancel()

    def _share(self, code: SentCode, files: IncomingFiles) -> Shared:
        config, versions = self._config.sampling.ray, VersionTable()
        versions.differences(HERE, installed_versions())
        in_flight = InFlightBytes(in_flight_limit(config))
        return Shared(config, self._setup, code, files, in_flight, versions, self._send)

    def _leave(self, exit_code: int) -> NoReturn:
        """Disconnect, which ends all actors, and remove the files of a Ray that the service started."""
        leaving = threading.Thread(target=self._disconnect, daemon=True)
        leaving.start()
        leaving.join(LEAVE_SECONDS)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(exit_code)

    def _disconnect(self) -> None:
        with suppress(Exception):
            ray.shutdown()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(self._inbox.put_nowait, unpack(line))
        if not self._connected:
            self._leave(0)
        loop.call_soon_threadsafe(self._inbox.put_nowait, None)

    def _connect(self) -> None:
        config = self._config.sampling.ray
        seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                connect(config, self._folder)
            except Exception as error:  # noqa: BLE001 - Ray raises many kinds for a missing cluster
                text = str(error).strip().partition("\n")[0] or type(error).__name__
                event = f"{config.cluster} to answer ({text})"
                self._send({"type": "waiting", "event": event})
                time.sleep(seconds)
                seconds = min(LONGEST_RETRY_SECONDS, 2 * seconds)
            else:
                return

    def _react(self, message: Message, shared: Shared) -> None:
        if (slot := message.get("to")) is not None:
            self._relay(slot, message["message"], shared.copies)
            return
        slot = message["slot"]
        if message["type"] == "start":
            self._links[slot] = ActorLink(slot, shared)
            self._links[slot].start()
        elif link := self._links.get(slot):
            link.finish() if message["type"] == "stop" else link.kill()

    def _relay(self, slot: int, message: Message, copies: PermitCopies) -> None:
        """Pass a supervisor's message to the slot, or to the slot that was first with a permit."""
        known = copies.of(message["id"]) if "id" in message else None
        if known is not None and message["type"] == "revoke":
            self._revoke(known, copies)
            return
        link = self._links.get(slot if known is None else known.speaker)
        if link is None:
            return
        match message["type"]:
            case "permit":
                copies.given(message, slot, time.monotonic())
            case "cut" if known is not None:
                known.is_cut = True
            case "grant":
                link.grant(message["id"])
                return
        link.send(message)

    def _revoke(self, known: CopiedPermit, copies: PermitCopies) -> None:
        permit_id = known.message["id"]
        for slot in known.slots:
            if link := self._links.get(slot):
                link.revoke(permit_id)
        copies.forget(permit_id)

    async def _copy_slow_permits(self, copies: PermitCopies) -> None:
        while True:
            await asyncio.sleep(COPY_SECONDS)
            for slow in copies.slow(time.monotonic()):
                link = self._other_link(slow.owner)
                if link is not None:
                    slow.slots.add(link.slot)
                    link.send(slow.message)

    async def _leave_a_lost_cluster(self, shared: Shared) -> None:
        """End, because only the next writer can connect to another node or head."""
        reason = await reason_to_reconnect(is_member, shared.note_silence)
        sys.stderr.write(f"{reason}\n")
        self._leave(1)

    def _other_link(self, slot: int) -> ActorLink | None:
        """Return another sampler, on another node if possible, or None."""
        here = self._links[slot].node if slot in self._links else ""
        others = [one for one in self._links.values() if one.fills and one.slot != slot]
        return min(others, key=lambda one: one.node == here, default=None)

    def _refuse(self, error: GrowcacheError) -> None:
        self._send(refusal_message(error))
