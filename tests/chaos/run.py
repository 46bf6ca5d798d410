"""The rounds of a run: faults are injected, then all invariants are checked."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from growcache.cache.check import Finding, check
from growcache.cache.files import CacheLayout, allocated_tree
from growcache.cache.index.reader import read_index
from growcache.cache.locks import is_locked
from growcache.cache.shard_refetches import purge_progress
from growcache.cache.sidecar import Sidecar
from growcache.errors import CacheError, CorruptShardError
from growcache.loading.snapshot import Snapshot
from tests.chaos import checks, schedule
from tests.chaos.content import WORDS, Words, key_name, wrong
from tests.chaos.disk import Disk, Watcher, own_disk
from tests.chaos.flips import Flip, became, flip_shard, skipped_shards, some_place, turn_over
from tests.chaos.foreign import put_foreign_lease
from tests.chaos.indexes import content
from tests.chaos.ledger import Ledger, read_books
from tests.chaos.processes import send
from tests.chaos.purges import Purges
from tests.chaos.readers import Line, ReaderProcess
from tests.chaos.reading import MIN_SAMPLES
from tests.chaos.remote import Remote
from tests.chaos.schedule import (
    READERS,
    SAMPLER,
    STOPPED,
    SUPERVISOR,
    Fault,
    Round,
    plan,
)
from tests.chaos.service import Service
from tests.chaos.states import current, observe, wait_for_moment
from tests.chaos.tally import Tally

DISK_BYTES = 12_000_000
HEAVY_OBJECTS = 1500  # of one sample each
BOUNDS = (4_000_000, 3_000_000, 2_200_000)
MOST_VIOLATIONS = 10
PURGE_SECONDS = 20.0  # it takes one or two
MEMORY_SECONDS = 300.0  # batches may stay this long in a stopped reader
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run.

    Attributes:
        seed: The seed of all choices.
        minutes: The duration.
        server: ``ceph``, ``moto`` or ``auto``.
        objects: The number of objects in the store.
        readers: The roles of the readers.
        kinds: The kinds of faults.
        rounds: The maximum number of rounds; None for no limit.
        heavy_tailed: Whether each object is one sample, of a heavy-tailed size.
        aim_seconds: The longest wait for the right moment of a kill.
    """

    seed: int
    minutes: float
    server: str = "auto"
    objects: int = 250
    readers: tuple[str, ...] = READERS
    kinds: frozenset[str] = schedule.EVERYTHING
    rounds: int | None = None
    aim_seconds: float = 4.0
    heavy_tailed: bool = False


def run(wanted: Plan, say: Say = lambda text: None) -> Tally:
    """Run, and keep the directory if an invariant was violated."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    kept = False
    with contextlib.ExitStack() as stack:
        remote = stack.enter_context(
            Remote.running(
                wanted.server,
                HEAVY_OBJECTS if wanted.heavy_tailed else wanted.objects,
                heavy_tailed=wanted.heavy_tailed,
            )
        )
        disk = stack.enter_context(own_disk(folder / "disk", DISK_BYTES))
        chaos = stack.enter_context(_running(wanted, folder, disk, remote, say))
        try:
            chaos.play_all()
        finally:
            tally = chaos.tally
            if tally.violations:
                kept = True
                shutil.copytree(
                    disk.root,
                    folder / "as-it-was",
                    symlinks=True,
                    ignore=_special,
                    dirs_exist_ok=True,
                )
                say(f"kept: {folder}")
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def _special(directory: str, names: list[str]) -> set[str]:
    """Return the special files, such as foreign leases, which `copytree` cannot copy."""
    return {
        name
        for name in names
        if stat.S_IFMT((Path(directory) / name).lstat().st_mode)
        not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    }


@contextlib.contextmanager
def _running(
    wanted: Plan, folder: Path, disk: Disk, remote: Remote, say: Say
) -> Iterator[Chaos]:
    log = (folder / "watcher.out").open("wb")
    service = Service(folder, disk.root / "cache", remote.source(), BOUNDS[0])
    watcher = Watcher(disk, log, folder / "watcher.json")
    readers: dict[str, ReaderProcess] = {}
    purges = Purges(service.root, folder, len(remote.versions))
    try:
        service.start()
        for role in wanted.readers:
            readers[role] = ReaderProcess(role, folder, service.root, wanted.seed)
        yield Chaos(wanted, disk, remote, service, watcher, readers, purges, say)
    finally:
        purges.kill()
        for reader in readers.values():
            reader.kill()
        service.kill()
        watcher.close()
        log.close()


@dataclass(slots=True)
class _Recent:
    """The faults of recent rounds that checks must take into account."""

    flips: list[Flip] = field(default_factory=list)
    index_faults: list[tuple[float, float]] = field(default_factory=list)
    full_disks: list[tuple[float, float]] = field(default_factory=list)

    def forget(self, before: float) -> None:
        self.flips = [flip for flip in self.flips if flip.at > before]
        self.index_faults = [span for span in self.index_faults if span[1] > before]
        self.full_disks = [span for span in self.full_disks if span[1] > before]

    def circumstances(self) -> checks.Circumstances:
        return checks.Circumstances(self.flips, self.index_faults, self.full_disks)


class Chaos:
    """A running system, and the faults that are injected into it."""

    def __init__(
        self,
        wanted: Plan,
        disk: Disk,
        remote: Remote,
        service: Service,
        watcher: Watcher,
        readers: dict[str, ReaderProcess],
        purges: Purges,
        say: Say,
    ) -> None:
        self.tally = Tally(wanted.seed, remote.server, bool(disk.size))
        self._wanted = wanted
        self._disk = disk
        self._remote = remote
        self._service = service
        self._watcher = watcher
        self._readers = readers
        self._purges = purges
        self._has_purged = False  # in this round
        self._say = say
        self._root = service.root
        self._ledger = Ledger()
        self._recent = _Recent()
        self._open: list[Flip] = []  # of this round
        self._inspected: set[tuple[int, str]] = set()
        self._warnings: list[Line] = []
        self._paused: dict[str, int] = {}
        self._filled_at: float | None = None
        self._refused = False
        self._lost_shards = self._drawn = 0
        self._last: deque[str] = deque(maxlen=30)
        self._round = -1
        self._allowed = 0
        self._allow(service.max_bytes)

    # ------------------------------------------------------------------ a run

    def play_all(self) -> None:
        """Play rounds until the time is over, then stop the service cleanly."""
        began = time.monotonic()
        self._await_first_samples()
        number = 0
        while self._goes_on(began, number):
            self.play(plan(self._wanted.seed, number, self._wanted.kinds))
            number += 1
            self.tally.minutes = (time.monotonic() - began) / 60
        self._end()

    def _goes_on(self, began: float, number: int) -> bool:
        if len(self.tally.violations) >= MOST_VIOLATIONS:
            return False
        if self._wanted.rounds is not None and number >= self._wanted.rounds:
            return False
        return time.monotonic() - began < self._wanted.minutes * 60

    def _await_first_samples(self) -> None:
        deadline = time.monotonic() + checks.PROGRESS_SECONDS
        while time.monotonic() < deadline:
            status = self._service.status()
            if status is not None and status.samples >= 2 * MIN_SAMPLES:
                return
            time.sleep(0.05)
        self._violated([f"liveness: not one sample; {self._service.last_words()}"])

    def _end(self) -> None:
        for reader in self._readers.values():
            reader.go_on()
        self._read_logs()
        self._stop_cleanly()
        self._ask_watcher()
        self.tally.link = self._remote.link.counts()
        self.tally.redrawn = self._ledger.redrawn
        for role, reader in self._readers.items():
            self.tally.samples[role] = reader.samples

    def play(self, this: Round) -> None:
        """Play a round, then check everything."""
        self._round = this.number
        self._remote.set_link(this.link)
        began = time.monotonic()
        if reader := self._readers.get(STOPPED):
            reader.go_on()
        for fault in this.faults:
            time.sleep(max(0.0, began + fault.at - time.monotonic()))
            self._last.append(f"round {this.number}: {fault}")
            self._do(fault)
        time.sleep(max(0.0, began + this.seconds - time.monotonic()))
        if reader:
            reader.pause()
        self._put_right()
        self._check_all()
        if this.calm:
            self._demand_progress()
        self.tally.rounds += 1
        status = self._service.status()
        if status is not None:
            self._say(f"  {status.state}, waiting for {status.waiting_for}")
            self._violated(checks.named(status.state, status.waiting_for))
        self._say(
            f"round {this.number}: {self.tally.all_kills} kills, "
            f"{sum(self.tally.flips.values())} flips, {self.tally.events['full disks']} full "
            f"disks, {self.tally.drawn} drawn, {len(self.tally.violations)} violations"
        )

    def _violated(self, found: list[str]) -> None:
        for text in found:
            self.tally.violations.append(f"round {self._round}: {text}")
            self._say(f"VIOLATION in round {self._round}, seed {self._wanted.seed}: {text}")
            self._say("  before it: " + "; ".join(list(self._last)[-8:]))

    # ----------------------------------------------------------------- faults

    def _do(self, fault: Fault) -> None:
        actions: dict[str, Callable[[Fault], object]] = {
            schedule.KILL: self._kill,
            schedule.PAUSE: self._pause,
            schedule.GO_ON: lambda fault: self._resume(fault.role),
            schedule.FILL: lambda _: self._fill(),
            schedule.FREE: lambda _: self._free(),
            schedule.FLIP_SHARD: self._flip,
            schedule.FLIP_SIDECAR: self._flip,
            schedule.FLIP_INDEX: self._damage_index,
            schedule.NO_INDEX: self._damage_index,
            schedule.REWRITE: lambda f: self._count(self._remote.rewrite(f.luck), "rewritten"),
            schedule.DELETE: lambda f: self._count(self._remote.delete(f.luck), "deleted"),
            schedule.RESTORE: lambda f: self._count(self._remote.restore(f.luck), "restored"),
            schedule.BOUND: self._change_bound,
            schedule.STOP: self._stop_and_start,
            schedule.OUTAGE: lambda _: self._outage(),
            schedule.RECOVER: lambda _: self._remote.recover(),
            schedule.STORM: self._storm,
            schedule.STORM_ENDS: lambda _: self._remote.recover(),
            schedule.EXPIRE: lambda _: self._expire(),
            schedule.RENEW: lambda _: self._remote.recover(),
            schedule.BAD_KEY: self._turn_bad,
            schedule.PURGE: self._purge,
            schedule.FOREIGN_LEASE: self._put_foreign_lease,
        }
        actions[fault.kind](fault)

    def _count(self, happened: bool, what: str) -> None:
        if happened:
            self.tally.events[f"objects {what}"] += 1

    def _outage(self) -> None:
        self._remote.outage()
        self.tally.events["outages of the store"] += 1

    def _storm(self, fault: Fault) -> None:
        self._remote.storm(fault.luck)
        self.tally.events["storms of refusals"] += 1

    def _purge(self, fault: Fault) -> None:
        if self._purges.begin(fault.luck):
            self._ledger.purges(self._purges.asked)
            self._has_purged = True
            self.tally.events["objects purged"] += 1

    def _kill_purges(self) -> None:
        self._count_purges("killed", self._purges.kill())

    def _count_purges(self, how: str, count: int) -> None:
        if count:
            self.tally.events[f"purges {how}, and given again"] += count

    def _expire(self) -> None:
        self._remote.expire()
        self.tally.events["credentials expired"] += 1

    def _turn_bad(self, fault: Fault) -> None:
        fails = self._remote.turn_bad(fault.luck)
        self.tally.events["keys that began to fail" if fails else "keys that answer again"] += 1

    def _put_foreign_lease(self, fault: Fault) -> None:
        put_foreign_lease(self._root, fault.luck)
        self.tally.events["foreign files among the leases"] += 1

    def _kill(self, fault: Fault) -> None:
        if fault.role == SUPERVISOR:
            self._kill_service(fault)
        elif fault.role == SAMPLER:
            self._kill_sampler(fault)
        elif reader := self._readers.get(fault.role):
            self._paused.pop(fault.role, None)
            states = self._freeze(fault.aim)
            reader.kill()
            self.tally.killed(fault.role, states)
            self._thaw()
            reader.start()

    def _freeze(self, aim: str) -> tuple[str, ...]:
        """Stop the service at the given moment; return the states of its files.

        Some moments are shorter than their notification. Then the service continues until the
        next such moment, as long as there is time.
        """
        patience = self._wanted.aim_seconds
        deadline = time.monotonic() + patience
        while True:
            samplers = self._service.samplers()
            if aim == "reserved":  # a stopped sampler does not start to write
                self._stop_all(samplers)
            wait_for_moment(self._root, aim, patience / 3)
            writers = [*samplers, self._service.pid]
            self._stop_all(writers if aim == "incoming" else reversed(writers))
            states = current(observe(self._root))
            if aim == "any" or aim in states or time.monotonic() > deadline:
                return states
            self._thaw()
            time.sleep(0.05)

    def _stop_all(self, pids: Iterable[int]) -> None:
        for pid in pids:
            send(pid, signal.SIGSTOP)

    def _thaw(self) -> None:
        for pid in (self._service.pid, *self._service.samplers()):
            send(pid, signal.SIGCONT)
        self._paused = {role: pid for role, pid in self._paused.items() if role in READERS}

    def _kill_service(self, fault: Fault) -> None:
        if not self._service.alive:
            return
        self._kill_now(fault.aim)
        time.sleep(fault.luck * 0.3)
        if fault.luck < 0.5:  # a purge goes on without the service
            self._purges.wait(PURGE_SECONDS)
        self._start()

    def _kill_now(self, aim: str) -> None:
        states = self._freeze(aim)
        left = self._service.kill()
        self.tally.killed(SUPERVISOR, states)
        self._violated([f"G7: sampler {pid} outlives its supervisor" for pid in left])
        self._paused = {role: pid for role, pid in self._paused.items() if role in READERS}

    def _kill_sampler(self, fault: Fault) -> None:
        samplers = self._service.samplers()
        if not samplers:
            return
        states = self._freeze(fault.aim)
        send(random.Random(fault.luck).choice(samplers), signal.SIGKILL)
        self.tally.killed(SAMPLER, states)
        self._thaw()

    def _start(self) -> None:
        self._kill_purges()  # one may own the cache
        seconds = self._service.start()
        ready, words = self._service.ready, ""
        if not ready:
            words = self._service.last_words()
        self._refused = checks.is_refusal(words, full=self._filled_at is not None)
        if self._refused:
            self.tally.events["starts refused while the disk was full"] += 1
            return
        self.tally.starts.append(seconds)
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        self._violated(checks.restart(seconds, ready=ready, words=words, load=load))

    def _pause(self, fault: Fault) -> None:
        pids = {
            SUPERVISOR: [self._service.pid] if self._service.alive else [],
            SAMPLER: self._service.samplers()[:1],
        }.get(fault.role)
        if pids is None:
            reader = self._readers.get(fault.role)
            pids = [reader.pid] if reader else []
        for pid in pids:
            self._paused[fault.role] = pid
            send(pid, signal.SIGSTOP)
            self.tally.events[f"pauses of {fault.role}"] += 1

    def _resume(self, role: str) -> None:
        if (pid := self._paused.pop(role, None)) is not None:
            send(pid, signal.SIGCONT)

    def _fill(self) -> None:
        if self._disk.fill():
            self._filled_at = time.monotonic()
            self.tally.events["full disks"] += 1

    def _free(self) -> None:
        if self._filled_at is not None:
            self._disk.free()
            self._recent.full_disks.append((self._filled_at, time.monotonic()))
            self._filled_at = None

    def _flip(self, fault: Fault) -> None:
        try:
            sound = {row.number for row in read_index(self._root).shards} - self._damaged
        except CacheError:
            return
        flip = flip_shard(self._root, fault.kind, fault.luck, sound)
        if flip is not None:
            self._open.append(flip)
            self._recent.flips.append(flip)

    @property
    def _damaged(self) -> set[int]:
        return {flip.number for flip in self._open}

    def _change_bound(self, fault: Fault) -> None:
        others = [bound for bound in BOUNDS if bound != self._service.max_bytes]
        bound = random.Random(fault.luck).choice(others)
        self._allow(max(self._allowed, bound))
        self._service.write_config(bound)
        self.tally.events["changes of the bound"] += 1

    def _allow(self, nbytes: int) -> None:
        self._allowed = nbytes
        self._watcher.allow(nbytes)

    def _follow_bound(self) -> None:
        """Apply a lowered bound from the moment that the service reports it."""
        status, bound = self._service.status(), self._service.max_bytes
        if self._allowed == bound or status is None or not self._service.ready:
            return
        if status.max_bytes == status.target_bytes == bound:
            self._allow(bound)

    # ------------------------------------------------------ stops and the index

    def _stop_and_start(self, fault: Fault) -> None:
        self._resume_service()
        self._kill_purges()
        self._stop_cleanly()
        if schedule.PURGE in self._wanted.kinds:
            self._purge_alone(fault)
        self._start()

    def _purge_alone(self, fault: Fault) -> None:
        """Purge an object while no service runs, at half of the times after a kill on the way."""
        self._purge(fault)
        if fault.luck < 0.5:
            self._purges.wait(fault.luck * 3)
            self._kill_purges()
        self._settle_purges()

    def _settle_purges(self) -> None:
        self._violated(self._purges.settle())
        self._count_purges("refused", self._purges.refused)
        self._purges.refused = 0

    def _resume_service(self) -> None:
        for role in (SUPERVISOR, SAMPLER):
            self._resume(role)

    def _stop_cleanly(self) -> None:
        self._free()
        if not self._service.alive:
            return
        code, running = self._service.stop()
        layout = CacheLayout(self._root)
        held = [p.name for p in (layout.supervisor_lock, layout.samplers_lock) if is_locked(p)]
        temporary = [str(p.relative_to(self._root)) for p in layout.incoming.iterdir()]
        temporary += [p.name for p in self._root.glob(".*.tmp")]
        found = self._findings()
        errors = checks.findings(found, self._damaged)
        self._violated(checks.stopped(checks.Leftovers(code, running, held, temporary, errors)))
        if code:
            self._say(self._service.last_words())
        self.tally.events["clean stops"] += 1
        self._repair_shards(found)

    def _repair_shards(self, found: list[Finding]) -> None:
        """Let ``check --repair`` set damaged shards aside; the same shards are drawn again."""
        damaged = self._damaged & self._live()
        self._violated(self._command("check", expect=int(bool(damaged))))
        if damaged:
            self._read_logs()
            self._settle_flips(found, heal=False)
            self._repair(damaged)
            self.tally.events["shards set aside by check --repair"] += len(damaged)

    def _repair(self, damaged: Collection[int]) -> None:
        self._violated(self._command("check", "--repair"))
        self._violated(checks.findings(self._findings(), set()))
        self._adopt_index()
        self._ledger.may_return(damaged)

    def _live(self) -> set[int]:
        return {row.number for row in read_index(self._root).shards}

    def _command(self, *words: str, expect: int = 0) -> list[str]:
        """Run a growcache command on the cache; return a violation if it exits unexpectedly."""
        name, *options = words
        command = [sys.executable, "-m", "growcache", name, str(self._root), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == expect:
            return []
        said = (done.stdout + done.stderr)[-500:]
        return [f"growcache {' '.join(words)}: exit code {done.returncode}: {said}"]

    def _damage_index(self, fault: Fault) -> None:
        """Kill the service, damage or remove the index, and have it rebuilt."""
        self._resume_service()
        self._kill_purges()
        self._free()
        if self._service.alive:
            self._kill_now("any")
        self._read_logs()
        self._settle_flips(self._findings())  # before the next fault, so that it gets no blame
        began = time.monotonic()
        self._recent.index_faults.append((began, began + 60))
        if fault.kind == schedule.NO_INDEX:
            self._remove_index()
            self.tally.events["indexes removed"] += 1
        else:
            outcome = self._flip_index(fault)
            self.tally.flips[fault.kind, outcome] += 1
        self._start()
        self._recent.index_faults[-1] = (began, time.monotonic() + 2)
        if fault.kind == schedule.NO_INDEX:
            self._adopt_index()

    def _flip_index(self, fault: Fault) -> str:
        dice, layout = random.Random(fault.luck), CacheLayout(self._root)
        files = [p for p in self._root.glob("index.sqlite*") if p.suffix != ".sqlite-shm"]
        path = dice.choice(sorted(p for p in files if p.stat().st_size))
        before = content(layout)
        turn_over(path, some_place(path, dice, tries=100))
        if any(finding.severity == "error" for finding in self._findings()):
            self._repair(())
            self.tally.events["indexes made again by check --repair"] += 1
            return "check"
        after = content(layout)
        if before == after:
            return "nobody: no row is another one"
        if path.name.endswith("-wal"):  # a crash can leave a truncated log too
            self._adopt_index()
            return "nobody: the log ends earlier"
        changed = before.decisive ^ after.decisive
        if not changed:
            return "nobody: in what is only shown (uses, history, rows of samples)"
        self._violated([f"G2: nobody noticed a bit of the index: {sorted(changed)[:2]}"])
        self._repair(())
        return "missed"

    def _remove_index(self) -> None:
        for path in self._root.glob("index.sqlite*"):
            path.unlink()

    def _adopt_index(self) -> None:
        """Adopt the contents of the rebuilt index."""
        try:
            books = read_books(self._root)
        except sqlite3.Error as error:
            self._violated([f"G8: the rebuilt index cannot be read: {error}"])
            return
        self._ledger.new_index(books)
        self._lost_shards = 0
        self._drawn = read_index(self._root).totals.drawn  # samples of the adopted shards

    # ----------------------------------------------------------------- checks

    def _put_right(self) -> None:
        self._free()
        self._remote.recover()
        for role in list(self._paused):
            self._resume(role)
        if not self._service.alive:
            words = self._service.last_words()
            code = self._service.exit_code
            if not self._refused:
                self._violated([f"the service ended by itself, exit code {code}: {words}"])
            self._start()
        self._settle_purges()
        self._follow_bound()

    def _read_logs(self) -> None:
        """Judge the readers' log lines, and restart readers that ended."""
        now = self._recent.circumstances()
        for role, reader in self._readers.items():
            for line in reader.news():
                self._judge(line, now)
            code = reader.exit_code
            if code is not None:
                if code not in (3, 0):
                    words = reader.last_words()
                    self._violated([f"G3: {role} ended with exit code {code}: {words}"])
                reader.start()

    def _judge(self, line: Line, now: checks.Circumstances) -> None:
        if line.event == "warning":
            self._warnings.append(line)
        elif line.event == "wrong":
            found = checks.delivered_wrong(line, now)
            self._violated(found)
            self.tally.raced += not found
        elif line.event == "beat":
            self._violated(checks.delivered_purged(line, self._purges.gone))
        elif line.event == "error":
            found = checks.reader_error(line, now)
            self._violated(found)
            if found:
                self._say(line.facts["trace"][-1500:])
            else:
                self.tally.readers_ended[line.facts["type"]] += 1

    def _check_all(self) -> None:
        self._read_logs()
        found = self._findings()
        self._violated(checks.findings(found, self._damaged))
        self._settle_flips(found)
        self._inspect()
        self._read_books()
        if self._has_purged:
            self._violated(self._purges.look())
            self._has_purged = False
        used = allocated_tree(self._root)
        if used > self._allowed:
            self._violated([f"G1: {used:,} bytes by du, {self._allowed:,} allowed"])
        self._ask_watcher()
        self._recent.forget(time.monotonic() - MEMORY_SECONDS)

    def _ask_watcher(self) -> None:
        seen, known = self._watcher.seen(), len(self.tally.seen.over)
        self._violated(checks.bound(replace(seen, over=seen.over[known:])))
        self.tally.seen = seen

    def _findings(self) -> list[Finding]:
        try:
            return check(self._root)
        except CacheError as error:
            return [Finding("error", None, str(error))]

    def _settle_flips(self, found: list[Finding], *, heal: bool = True) -> None:
        skipped, live = skipped_shards(self._warnings), self._live()
        numbers = {finding.shard for finding in found if finding.shard is not None}
        live -= {flip.number for flip in self._open if not flip.is_there}
        if self._purges.asked:  # a purge drops what is damaged, and it is drawn again
            self._ledger.may_return(self._damaged)
        for flip in self._open:
            outcome = became(flip, skipped, numbers, live)
            self.tally.flips[flip.kind, outcome] += 1
            if outcome == "missed":
                self._violated([f"G2: a flipped bit was not noticed in {flip.path}"])
            if heal:
                flip.heal()
        self._open.clear()
        self._warnings.clear()

    def _inspect(self) -> None:
        """Check every sample of the new shards, and its origin."""
        try:
            with Snapshot.take(self._root, job="harness") as snapshot:
                sidecars = {}
                for row in snapshot.shards:
                    with contextlib.suppress(CorruptShardError):
                        sidecars[row.number] = snapshot.sidecar(row.number)
                        if (row.number, row.digest) not in self._inspected:
                            shard = snapshot.mapped(row.number)
                            samples = [_words(shard[i]["x"]) for i in range(row.samples)]
                            self._violated(
                                _origins_wrong(sidecars[row.number], samples, self._remote)
                            )
                            self._violated(checks.holes(sidecars[row.number]))
                            self._inspected.add((row.number, row.digest))
                        gone = self._purges.gone
                        self._violated(checks.purged(sidecars[row.number], gone))
                self._violated(self._ledger.describe(sidecars))
        except CacheError as error:
            self._violated([f"a snapshot cannot be taken: {error}"])

    def _read_books(self) -> None:
        try:
            books = read_books(self._root)
        except sqlite3.Error as error:
            self._violated([f"the index cannot be read: {error}"])
            return
        self._violated(self._ledger.enter(books))
        view = read_index(self._root)
        found, purging = view.totals, bool(purge_progress(view.meta).numbers)
        self._violated(checks.totals(found, self._lost_shards, purging=purging))
        self._lost_shards = max(self._lost_shards, found.lost_shards)
        self.tally.drawn += max(0, found.drawn - self._drawn)
        self._drawn = found.drawn

    def _demand_progress(self) -> None:
        """Without faults, samples are drawn and every reader receives batches."""
        self._remote.set_link({})
        for reader in self._readers.values():
            reader.go_on()
        began, before = time.monotonic(), read_index(self._root).totals.drawn
        waiting = set(self._readers)
        drew = False
        while not (drew and not waiting) and time.monotonic() - began < checks.PROGRESS_SECONDS:
            time.sleep(0.1)
            drew = drew or read_index(self._root).totals.drawn > before
            self._read_logs()
            waiting = {r for r in waiting if self._readers[r].beat_at < began}
        waited = time.monotonic() - began
        status = self._service.status()
        event = status.waiting_for if status is not None else None
        self._violated(checks.progress(drew, waited, event))
        for role in waiting:
            self._violated(checks.reading(role, waited))


def _words(sample: object) -> Words:
    import numpy as np

    return np.asarray(sample, np.int64).reshape(-1, WORDS)


def _origins_wrong(sidecar: Sidecar, samples: Sequence[Words], remote: Remote) -> list[str]:
    """Return a violation if a sample is damaged, or is not from its recorded origin."""
    if bad := sum(int(wrong(words).any()) for words in samples):
        return [f"G2: shard {sidecar.number} has {bad} wrong samples, but a valid digest"]
    for place, words in enumerate(samples):
        origin = sidecar.origin(place)
        key, version, row = words[0, :3].tolist()
        start = 0 if remote.heavy_tailed else origin.start
        said = (origin.key, origin.etag, start + len(words) - 1)
        if said != (key_name(key), remote.etag(key, version), int(words[-1, 2])):
            return [
                f"shard {sidecar.number} records {said} for sample {place}, but it is row {row} "
                f"of version {version} of {key_name(key)}"
            ]
    return []
