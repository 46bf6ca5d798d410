"""Ranks on several machines agree on the length of each pass, in a separate gloo group.

One all-reduce is enough for an agreement. The group is made from the store that
`init_process_group` left, and is not registered with torch. So a collective in a thread of
growcache never mixes with those of the training loop, whatever their backend.

A rank joins a round as soon as it has an offer, and otherwise every few seconds without one. A
round in which all ranks have offers takes one all-reduce. All other rounds are signs of life: a
lost machine fails the round long before the loop's own collectives time out.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from growcache.errors import CacheError, ConfigError, GrowcacheError
from growcache.loading.agreement import Offer, digest_of
from growcache.loading.options import LoaderOptions
from growcache.loading.waiting import WaitControl
from growcache.threads import DaemonThread, StoppedError
from growcache.torch.stuck_loop import end_stuck_loop

ROUND_SECONDS = 2.0  # between two rounds without an offer
# A rank counts as lost if its threads do not run for this time, for example because the
# interpreter's lock is held.
ANSWER_SECONDS = 30.0
NAMING_SECONDS = ROUND_SECONDS + 1.5  # in which the remaining ranks notice it, too
WARN_SECONDS = 5.0
REPEAT_SECONDS = 60.0  # between two warnings
PATIENCE_SECONDS = 1800.0  # for all ranks to start iterating, as in torch.distributed
LOOK_SECONDS = 0.2
REASON_BYTES = 512

_log = logging.getLogger(__name__)
_group_numbers = itertools.count()  # all ranks make their loaders in the same order


def node_group(options: LoaderOptions) -> NodeGroup:
    if not (hasattr(Store, "clone") and dist.is_gloo_available()):
        raise ConfigError(
            "growing epochs over several machines need torch 2.8 or later, built with gloo; "
            f"found torch {torch.__version__}; install that version, or set samples_per_epoch",
            code="GC705",
        )
    return NodeGroup(
        options, PrefixStore(f"growcache/{next(_group_numbers)}", _get_default_store())
    )


class NodeGroup:
    """The agreement of one iteration of a loader; see `growcache.loading.agreement.Agreement`."""

    def __init__(self, options: LoaderOptions, store: Store) -> None:
        self._options = options
        self._rank, self._world = options.ranks.rank, options.ranks.world_size
        # Separate connections, because a store serves its calls one after another, and some
        # calls wait.
        self._store, self._naming_store = store.clone(), store.clone()  # type: ignore[attr-defined]
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._agreed: int | None = None
        self._error: GrowcacheError | None = None
        self._closing = False
        self._left = ""  # the ranks that left the group, in words
        self._reason: Callable[[], str] = _not_asked_yet
        self._names: list[str] = []  # host and process of each rank
        self._offered_at = self._warned_at = -REPEAT_SECONDS
        self._group: Any = None
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="growcache-nodes", daemon=True)
        self._thread.start()

    def prepare(self, reason: Callable[[], str]) -> None:
        self._reason = reason

    def agree(self, offer: Offer, watch: WaitControl) -> int:
        began, long = time.monotonic(), False
        with self._changed:
            self._offer, self._agreed, self._offered_at = offer, None, began
            self._changed.notify_all()
            while self._agreed is None:
                if self._error is not None:
                    raise self._error
                if watch.stopped():
                    raise StoppedError
                if not long and time.monotonic() - began > WARN_SECONDS:
                    long = True
                    watch.on_long_wait()
                self._changed.wait(LOOK_SECONDS)
            self._reason = _not_asked_yet
            return self._agreed

    def close(self) -> None:
        """Tell the other ranks in a last round, which they join within `ROUND_SECONDS`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(ROUND_SECONDS + 1)

    def _run(self) -> None:
        try:
            self._meet()
            while not self._ended():
                self._round()
            # Gloo's threads abort a process if they free tensors while it ends.
            self._group = None
        except Exception as error:  # noqa: BLE001 - torch's errors must not leave the loop waiting
            self._fail(error)

    def _ended(self) -> bool:
        return bool(self._left) or self._error is not None

    # --- the members ---

    def _meet(self) -> None:
        """Connect with all ranks after all of them have started iterating."""
        self._store.set(f"here/{self._rank}", f"{socket.gethostname()} {os.getpid()}")
        began = time.monotonic()
        while absent := self._absent_after(self._store, "here", ROUND_SECONDS):
            waited = time.monotonic() - began
            if self._ends_before_all_are_here():
                return
            self._warn_of_wait(f"{_rank_names(absent)} to start iterating")
            if waited > PATIENCE_SECONDS:
                raise RuntimeError(f"{_rank_names(absent)} did not start iterating")
        if self._others_left():
            return
        self._group = dist.ProcessGroupGloo(
            self._store, self._rank, self._world, timedelta(seconds=ANSWER_SECONDS)
        )
        keys = [f"here/{rank}" for rank in range(self._world)]
        self._names = [value.decode() for value in self._store.multi_get(keys)]

    def _ends_before_all_are_here(self) -> bool:
        """Whether this rank leaves before all are here, or another rank left.

        A leaving rank announces it before it looks for the others again.
        """
        if not self._closing:
            return self._others_left()
        self._store.set(f"left/{self._rank}", "")
        if not self._absent_after(self._store, "here", 0.0):
            return False  # they connect, and this rank leaves in a round
        self._left = _rank_names([self._rank])
        return True

    def _others_left(self) -> bool:
        gone = self._ranks_that_left(self._store)
        if gone:
            self._left = _rank_names(gone)
            self._raise_in_loop(self._left_error())
        return bool(gone)

    def _ranks_that_left(self, store: Store) -> list[int]:
        """Return the other ranks that left before all were here."""
        others = (rank for rank in range(self._world) if rank != self._rank)
        return [rank for rank in others if store.check([f"left/{rank}"])]

    def _absent_after(self, store: Store, key: str, seconds: float) -> list[int]:
        """Return the ranks that have not set their key.

        The store is polled, because its own wait would log each timeout.
        """
        keys = [f"{key}/{rank}" for rank in range(self._world)]
        deadline = time.monotonic() + seconds
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return [rank for rank in range(self._world) if not store.check([keys[rank]])]

    # --- rounds ---

    def _round(self) -> None:
        offer, leaves = self._next_offer()
        terms = "" if offer is None else offer.terms(self._options)
        digest = digest_of(terms) if offer is not None else 0
        rows = 0 if offer is None else offer.rows
        ready, stays = int(offer is not None), int(not leaves)
        began = time.perf_counter()
        all_ready, none_ready, all_stay, least, low, high = self._smallest(
            [ready, 1 - ready, stays, rows, digest, -digest]
        )
        if not all_stay:
            self._see_off(leaves)
        elif not all_ready:
            if not none_ready:
                self._report(offer)
        elif low != -high:
            self._refuse_unlike(terms)
        else:
            _log.debug(
                "%s: %d rows for each rank, agreed on in %.2f ms",
                *(terms, least, 1e3 * (time.perf_counter() - began)),
            )
            with self._changed:
                self._offer, self._agreed = None, least
                self._changed.notify_all()

    def _next_offer(self) -> tuple[Offer | None, bool]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._offer is not None or self._closing, timeout=ROUND_SECONDS
            )
            return self._offer, self._closing

    def _smallest(self, numbers: Sequence[int]) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        how: Any = dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([values], how).wait()
        found: list[int] = values.tolist()
        return found

    def _texts(self, text: str) -> list[str]:
        """Return the text of each rank."""
        data = text.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        all_of_them = [torch.zeros_like(mine) for _ in range(self._world)]
        self._group.allgather([all_of_them], [mine]).wait()
        found = (bytes(one.tolist()).rstrip(b"\0") for one in all_of_them)
        return [one.decode(errors="ignore") for one in found]

    def _report(self, offer: Offer | None) -> None:
        """Warn which ranks are missing, on the ranks that wait for them."""
        reasons = self._texts("" if offer is not None else self._reason_now())
        if offer is not None:
            waited_for = [
                f"{self._name_of(rank)}: {reason}"
                for rank, reason in enumerate(reasons)
                if reason
            ]
            self._warn_of_wait("; ".join(waited_for))

    def _reason_now(self) -> str:
        try:
            return self._reason()
        except (
            GrowcacheError,
            OSError,
        ) as error:  # the cache may be gone, which the loop will report
            return str(error)

    def _warn_of_wait(self, event: str) -> None:
        now = time.monotonic()
        waits_long = self._offer is not None and now - self._offered_at > WARN_SECONDS
        if waits_long and now - self._warned_at > REPEAT_SECONDS:
            self._warned_at = now
            _log.warning("rank %d of job %s waits for %s", self._rank, self._options.job, event)

    def _refuse_unlike(self, terms: str) -> None:
        said = self._texts(terms)
        other = next((rank for rank in range(self._world) if said[rank] != said[0]), 0)
        self._raise_in_loop(
            ConfigError(
                f"ranks must iterate and load states in the same way: rank 0 is at {said[0]}, "
                f"{self._name_of(other)} at {said[other]}",
                code="GC703",
            )
        )

    def _see_off(self, leaves: bool) -> None:
        gone = [rank for rank, left in enumerate(self._texts("left" * leaves)) if left]
        self._left = _rank_names(gone)
        if not leaves:
            self._raise_in_loop(self._left_error())

    def _left_error(self) -> CacheError:
        return CacheError(
            f"{self._left} of job {self._options.job} ended, or closed the loader, while "
            "others continue; iterate in the same way on all ranks",
            code="GC704",
        )

    def _name_of(self, rank: int) -> str:
        if not self._names:
            return f"rank {rank}"
        host, pid = self._names[rank].rsplit(" ", 1)
        return f"rank {rank} (pid {pid} on {host})"

    # --- a lost rank ---

    def _raise_in_loop(self, error: GrowcacheError) -> None:
        """Raise the error where the loop next waits for a pass."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _fail(self, why: Exception) -> None:
        self._group = None  # its connections close, so the others notice at once
        thread = DaemonThread("naming")
        naming = thread.submit(self._missing_ranks)
        thread.close(wait=False)
        # Over a cut link this may take forever.
        found = naming.wait(NAMING_SECONDS + 2) and not naming.has_failed
        missing = naming.result() if found else None
        error = (
            self._left_error()
            if self._left
            else CacheError(self._loss_text(missing, why), code="GC704")
        )
        if missing != [] and not self._left:  # else all of them run, or ended deliberately
            _log.error("%s", error)
            if not self._closing:
                end_stuck_loop(self._loop_thread, lambda: self._closing)
        self._raise_in_loop(error)

    def _missing_ranks(self) -> list[int]:
        self._naming_store.set(f"alive/{self._rank}", "")
        if gone := self._ranks_that_left(self._naming_store):
            self._left = _rank_names(gone)
        return self._absent_after(self._naming_store, "alive", NAMING_SECONDS)

    def _loss_text(self, missing: list[int] | None, why: Exception) -> str:
        again = "start all ranks of the job again, with the states saved last"
        job = f"of job {self._options.job}"
        if missing is None:
            lost = (
                f"rank {self._rank} {job} has lost the others: the store on the machine of "
                f"{self._name_of(0)} does not answer"
            )
        elif missing:
            names = ", ".join(map(self._name_of, missing))
            lost = f"{names} {job} {'does' if len(missing) == 1 else 'do'} not answer any more"
        elif not self._names:
            lost = (
                f"the ranks {job} cannot connect by gloo; set GLOO_SOCKET_IFNAME to the network "
                "interface between the machines"
            )
        else:
            lost = f"the connection of the ranks {job} broke, though all of them run"
        return f"{lost}; {again} ({_short(str(why))})"


def _short(message: str) -> str:
    """Return an error of gloo without its source location and advice.

    >>> _short("[/pair.cc:553] Connection closed by peer [10.0.0.1]:29. This is typically …")
    'Connection closed by peer [10.0.0.1]:29'
    """
    return re.sub(r"^\[\S+\] ", "", message.strip()).partition(". ")[0]


def _not_asked_yet() -> str:
    return "its loop has not come so far"


def _rank_names(ranks: Sequence[int]) -> str:
    """Return the ranks as text.

    >>> _rank_names([1, 2])
    'ranks 1, 2'
    """
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
