"""Hand out permits to samplers, and process their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from growcache.cache.sidecar import Sidecar
from growcache.config import Config
from growcache.errors import CacheFullError, SamplingError
from growcache.sampling.fixed_set import until_reached
from growcache.sampling.group_queue import NO_ROOM, IssuedPermit
from growcache.sampling.messages import Message
from growcache.sampling.permits import PermitIssuer
from growcache.sampling.rate_limiter import DISK_EVENT, STORE_EVENT
from growcache.sampling.sampler_pool import (
    MOST_SUSPICION,
    AssignedPermit,
    SamplerDeath,
    SamplerSlot,
    crash_suspects,
    group_memory_bytes,
)
from growcache.sampling.sizing import LIMIT_OF_EXPECTED, check_bound
from growcache.sampling.space_allocator import FULL_FOR_GOOD
from growcache.usercode import printable, short_key


class Dispatcher(PermitIssuer):
    def turn(self, slots: Sequence[SamplerSlot]) -> None:
        for permit_id in self.follow_refetches():
            for slot in slots:
                if slot.forget(permit_id):
                    slot.send({"type": "revoke", "id": permit_id})
        answers: list[Message] = [
            {"type": "grant", "id": permit_id} for permit_id in self.writes.grant()
        ]
        for permit_id, lengths in self.writes.cuts.items():
            answers.append({"type": "cut", "id": permit_id, "lengths": lengths})
        for answer in answers:
            for slot in slots:
                if answer["id"] in slot.permits:
                    slot.paused.discard(answer["id"])
                    slot.note_progress()
                    slot.send(answer)
        while idle := self._slots_with_room(slots):
            slot = min(idle, key=lambda slot: slot.visits_left)
            given = self.next_permit()
            if given is None:
                break
            nbytes = self.writes.permits[given.id].estimate_bytes
            slot.permits[given.id] = AssignedPermit(len(given.visits), nbytes=nbytes)
            slot.note_progress()
            slot.send(given.to_message())
        # Without eviction, nothing is ever added to a full cache.
        complete = self.complete or (self._config.cache.eviction == "none" and self.at_rest)
        # A complete cache remains complete while a shard is drawn again.
        still = self._cache.meta.complete and bool(self._cache.refetch_queue.pending)
        self._cache.meta.set_complete(complete or still)

    def _slots_with_room(self, slots: Sequence[SamplerSlot]) -> list[SamplerSlot]:
        reads = self._config.sampling.concurrency
        now, memory = self._clock(), group_memory_bytes(self._config, self._memory_bytes)
        if self._awaits_open_group and self.queue.due(now) is not None:
            return [slot for slot in slots if slot.only_waits or slot.has_room(reads, memory)]
        if self.queue.due_refetch(now) is not None:
            return [slot for slot in slots if slot.has_room_for_refetch(reads, memory)]
        return [slot for slot in slots if slot.has_room(reads, memory)]

    def receive(self, slot: SamplerSlot, message: Message) -> list[str]:
        """Handle a message about a permit; return the errors that it reports."""
        permit_id = message["id"]
        if permit_id not in slot.permits:
            return []
        match message["type"]:
            case "need":
                slot.paused.add(permit_id)
                self.need(permit_id, message["bytes"], message["samples"])
            case "setback":
                self.set_back(permit_id, message["place"], message["error"])
            case "written":
                slot.forget(permit_id)
                return self.written(permit_id, message.get("holes", {}))
            case "failed":
                slot.forget(permit_id)
                if message["spent"]:
                    self.budget_spent(permit_id)
                    return []
                if message["refused"]:
                    self.store_refused(permit_id, message["refused"])
                elif message["set_aside"]:
                    self.makeup_failed(permit_id)
                else:
                    self.failed(permit_id, message["error"], disk=message["disk"])
                return [message["error"]]
        return []

    def purged(self) -> None:
        """Forget everything that names the objects that were just purged."""
        self.makeups.forget_purged(self._cache.purger.is_visit_purged)
        self.last_error = ""

    def lost(self, shards: Sequence[int]) -> None:
        """Draw shards again that a purge could not rewrite."""
        for number in shards:
            self.queue.lost(number // self._sizing.group_shards)

    def follow_refetches(self) -> list[str]:
        """Apply the readers' refetches; return permits that no reader needs any more."""
        self._refetches.update_from_refetch_queue(
            self._forecast.shard_bytes, self.space.capacity
        )
        if self._fixed_set.is_whole:
            self._refetches.refuse_never_drawn()
        vain = [id_ for id_, one in self.writes.permits.items() if self._is_in_vain(one)]
        for id_ in vain:
            group = self.writes.permits.pop(id_).permit.group
            self.queue.done(group)
        return vain

    def _is_in_vain(self, issued: IssuedPermit) -> bool:
        if issued.granted or issued.fresh:
            return not issued.granted and self._fixed_set.is_whole
        return issued.waits and not self.writes.is_refetch(issued)

    @property
    def _awaits_open_group(self) -> bool:
        return any(map(self._fixed_set.awaits_open, self.writes.permits.values()))

    def adopt_settings(self, config: Config) -> None:
        self.check_bound(config)
        self._config = config
        self.space.adopt_settings(config.cache)
        self._cache.adopt_settings(config.cache)

    def check_bound(self, config: Config) -> None:
        """Refuse a bound that cannot hold groups of full shards, and the encoded groups."""
        expected = self._forecast.full_group_bytes()
        larger = min(self._limit_bytes, LIMIT_OF_EXPECTED * expected) if self._ragged else 0
        check_bound(
            config,
            expected,
            self._catalog.allocated_bytes,
            largest_bytes=max(
                [larger, *(f.need_bytes or 0 for f in self.writes.permits.values())]
            ),
        )

    @property
    def at_work(self) -> bool:
        return bool(self.writes.permits) or self.queue.failing > 0

    @property
    def at_rest(self) -> bool:
        """Whether nothing in this run can change the cached shards any more."""
        if (
            not self.writes.stuck
            or self.writes.short_of_disk
            or (self._cache.shrinking and self._config.cache.eviction != "none")
        ):
            return False
        spent = self.verdict.final and self.verdict.state == "waiting"
        if (self._cache.refetch_queue.pending or self._awaits_open_group) and not spent:
            return False
        return self.verdict.final or bool(self.writes.permits and not self.space.evicts)

    @property
    def final_reason(self) -> str:
        if self.verdict.state == "complete":
            return "all that is to be cached is cached"
        spent = self.verdict.final and self.verdict.state == "waiting"
        return (self.verdict.waiting_for or "") if spent else FULL_FOR_GOOD

    # ----------------------------------------------------------------- reports

    def need(self, permit_id: str, nbytes: int, samples: Sequence[int] | None = None) -> None:
        """Record the disk space that an encoded group needs, and the samples of each shard."""
        if issued := self.writes.permits.get(permit_id):
            issued.need_bytes, issued.asked_at = nbytes, self._clock()
            issued.samples = samples
            if nbytes > self.space.capacity and not issued.fresh:
                self._refetches.refuse(
                    issued.permit.group, NO_ROOM.format(nbytes, nbytes, self.space.capacity)
                )
            self._forecast.learn(issued.permit, nbytes)
            self.breaker.answered(permit_id, whole=True)

    def visited(self, permit_id: str, visits: int) -> None:
        """Record how many visits of a permit have ended, because one more has."""
        self.breaker.answered(permit_id, whole=False)
        if issued := self.writes.permits.get(permit_id):
            self._egress.visits += visits - issued.visited
            issued.visited = visits

    def written(
        self, permit_id: str, holes: Mapping[str, Mapping[str, int]] | None = None
    ) -> list[str]:
        """Commit a group that is on disk; return the reasons of its holes.

        ``holes`` counts kinds of holes by shard.
        """
        issued = self.writes.permits.get(permit_id)
        if issued is None:
            return []  # the permit was withdrawn
        if issued.permit.purged != self._purged_places(issued.permit.visits):
            self._pop(permit_id)  # it may have samples of objects that were purged since
            self.queue.returned(issued.permit.group)
            return []
        del self.writes.permits[permit_id]
        written = [self._sidecar(permit_id, number) for number in issued.permit.written]
        shards = self._until_limit(issued, written)
        if not shards:
            self._cache.discard(permit_id, issued.permit.shards)
            self.queue.returned(issued.permit.group)
            return []
        try:
            self.makeups.committing(issued.permit, written)
            rows = self._cache.commit(permit_id, shards)
        except CacheFullError as error:  # nothing of it is left, so it is filled again
            self._cache.discard(permit_id, issued.permit.shards)
            self._fail(issued.permit.group, str(error), disk=True)
            return []
        self.makeups.committed(issued.permit)
        self.space.filled(sum(row.allocated for row in rows))
        # The next run fills the group again, for its other shards.
        if len(shards) < len(written):
            self._cache.discard(permit_id, issued.permit.shards)
            self.queue.returned(issued.permit.group)
        else:
            self.queue.done(issued.permit.group)
        fresh = [shard for shard in shards if shard.number in issued.fresh]
        for shard in fresh:
            self.hole_kinds.update((holes or {}).get(str(shard.number), {}))
        reasons = self._skipped.count(issued.permit, fresh)
        allowed = self._config.sampling.max_skipped
        self._skipped.check(allowed, self._cache.totals(), complete=self.complete)
        return reasons

    def _until_limit(self, issued: IssuedPermit, shards: list[Sidecar]) -> list[Sidecar]:
        """Return the first shards of a group that are enough for ``--samples``."""
        if self._limits.samples is None or not issued.fresh:
            return shards
        wanted = self._limits.samples - self.drawn_this_run
        return shards[: until_reached([shard.samples for shard in shards], wanted)]

    def _sidecar(self, permit_id: str, number: int) -> Sidecar:
        path = self._cache.layout.incoming_path(permit_id, number, ".json")
        return Sidecar.from_bytes(path.read_bytes(), str(path))

    def store_refused(self, permit_id: str, waiting_for: str) -> None:
        if issued := self._pop(permit_id):
            self.breaker.refused(permit_id, printable(waiting_for), self._clock())
            self.queue.returned(issued.permit.group)

    def budget_spent(self, permit_id: str) -> None:
        if issued := self._pop(permit_id):
            self.queue.returned(issued.permit.group)

    def failed(self, permit_id: str, error: str, *, disk: bool) -> None:
        """Handle a failed permit. ``disk``: the local disk failed, so the cache must shrink."""
        if issued := self._pop(permit_id):
            self._fail(issued.permit.group, error, disk=disk)
            if self.breaker.waiting_for and not disk:  # the permit was a trial
                self.breaker.waiting_for = f"the store to answer ({self.last_error})"
            if disk:
                self.space.make_room(
                    self._cache.bytes_left_for_shards() + issued.estimate_bytes
                )

    def set_back(self, permit_id: str, place: int, error: str) -> None:
        if issued := self.writes.permits.get(permit_id):
            self.makeups.set_back(issued.permit, place, error)

    def makeup_failed(self, permit_id: str) -> None:
        if issued := self._pop(permit_id):
            due = self.makeups.failed_again(issued.permit)
            self.queue.set_aside(issued.permit.group, due)

    def _fail(self, group: int, error: str, *, disk: bool) -> None:
        self.failures += 1
        self._retry_event = DISK_EVENT if disk else STORE_EVENT
        self.last_error = printable(error)
        self.queue.failed(group, self._clock(), disk=disk)

    def abandoned(self, permit_id: str, death: SamplerDeath) -> None:
        """Reopen the group of a dead sampler, to be filled at once."""
        if issued := self._pop(permit_id):
            group = issued.permit.group
            if self.queue.abandoned(group, death.suspicion) >= MOST_SUSPICION:
                if not issued.fresh:
                    self._refetches.refuse(group, f"sampler after sampler died on it: {death}")
                    return
                first = short_key(issued.permit.visits[0].entry.key)
                raise SamplingError(
                    f"sampler after sampler died on group {group} (its first object is "
                    f"{first}), the last {death}"
                    + ("" if death.stalled else crash_suspects(self._config)),
                    code="GC503",
                )

    def discard_all(self) -> None:
        for permit in list(self.writes.permits):
            self._pop(permit)

    def _pop(self, permit_id: str) -> IssuedPermit | None:
        issued = self.writes.permits.pop(permit_id, None)
        if issued is not None:
            self._cache.discard(permit_id, issued.permit.shards)
            self.breaker.ended(permit_id, self._clock())
        return issued
