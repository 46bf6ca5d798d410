"""Where the consumer of a loader stands; used by its thread alone."""

from __future__ import annotations

from growcache.loading.options import LoaderOptions
from growcache.loading.packed import Packed
from growcache.loading.state import Form, LoaderState, Mark, PassPlan


class Bookmark:
    """Follows what is handed out, batch by batch.

    Args:
        options: of the loader.
        start: where it begins.
    """

    def __init__(self, options: LoaderOptions, start: LoaderState) -> None:
        self._whole_passes = options.samples_per_epoch is None
        self._epoch, self._step = start.epoch, start.step
        self._next_epoch, self._next_pass = start.next_epoch, start.next_pass
        self._fingerprint, self._form, self._mark = start.fingerprint, start.form, start.mark
        # A block may reach into the next pass, so that begins before this one has ended.
        self._plans = {} if start.plan is None else {start.plan.number: Packed(start.plan)}

    @property
    def state(self) -> LoaderState:
        """Where the consumer stands now."""
        mark = self._mark
        return LoaderState(
            epoch=self._epoch,
            step=self._step,
            next_epoch=self._next_epoch,
            next_pass=self._next_pass if mark is None else mark.pass_number + 1,
            fingerprint=self._fingerprint,
            form=self._form,
            mark=mark,
            plan=None if mark is None else self._plans[mark.pass_number].get(),
        )

    @property
    def step(self) -> int:
        """Batches of its epoch that were handed out; unlike the state no plan is made for it."""
        return self._step

    def begin_epoch(self, number: int) -> None:
        """Note that the consumer asked for this epoch, and wants no earlier one any more."""
        self._next_epoch = number
        if self._whole_passes and number != self._epoch:
            self._leave(number)

    def begin_pass(self, number: int, plan: Packed[PassPlan], fingerprint: str | None) -> None:
        """Note that a snapshot was taken."""
        self._plans[number] = plan
        self._fingerprint = fingerprint
        if self._mark is None:
            self._next_pass = number + 1

    def deliver(self, epoch: int, mark: Mark, form: Form) -> None:
        """Note that the next batch is handed out."""
        self._step = self._step + 1 if epoch == self._epoch else 1
        self._epoch, self._form = epoch, form
        if self._mark is None or mark.pass_number != self._mark.pass_number:
            self._plans = {n: p for n, p in self._plans.items() if n >= mark.pass_number}
        self._mark = mark

    def end_epoch(self, number: int) -> None:
        """Note that the epoch is over."""
        self._next_epoch = number + 1
        if self._whole_passes:
            self._leave(number + 1)
        else:
            self._epoch, self._step = number + 1, 0

    def _leave(self, epoch: int) -> None:
        """Stand before an epoch that begins with a new snapshot."""
        if self._mark is not None:
            self._next_pass = self._mark.pass_number + 1
        self._epoch, self._step, self._mark = epoch, 0, None
