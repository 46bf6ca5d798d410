"""A thread between a gather process and the consumer, for what must run in the trainer.

The user's `batch_transform` is applied there to batches that arrived, ahead of the loop, and
there they are sent on to a device.
"""

from __future__ import annotations

import functools

from growcache.loading.blocks import Block, Cutter
from growcache.loading.links import LAST, Failure
from growcache.loading.process import ProcessSource
from growcache.loading.sources import Kind, Queued
from growcache.loading.state import LoaderState


class RelayedSource(Queued):
    """A producer in a gather process, whose blocks a thread cuts ahead of the consumer.

    Args:
        source: that the blocks come from.
        wanted: the epoch that begins now.
        cutter: makes batches of blocks.
    """

    kind: Kind = "process"
    halted: LoaderState | None = None  # nobody needs to know early
    making = (0.0, 0.0)

    def __init__(self, source: ProcessSource, wanted: int, cutter: Cutter) -> None:
        super().__init__(wanted)
        self._source = source
        self._cutter = cutter
        self._link.when_closed(source.close)
        self._begin_thread(self._run)

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self._link.begin(epoch)
        self._source.begin(epoch)

    def end_pass(self, pass_number: int) -> None:
        """Say that a pass is over."""
        self._source.end_pass(pass_number)

    def halt(self) -> None:
        """Have it make no more blocks."""
        self._source.halt()

    def _run(self) -> None:
        try:
            self._pass_all_on()
        except BaseException as error:  # noqa: BLE001 - it is raised in the consumer
            self._link.put(Failure(error))

    def _pass_all_on(self) -> None:
        link, last = self._link, False
        while not last and not link.stop.is_set():
            item = self._source.receive()
            assert item is not None  # it waits without end
            last = isinstance(item, LAST)
            if isinstance(item, Block):
                self._pass_on(item)
            else:
                link.put(item)

    def _pass_on(self, block: Block) -> None:
        """Cut a block and put it, once there is room."""
        link = self._link
        self._cutter.cut_now(block, functools.partial(link.wants, block.epoch))
        link.token()
        link.put(block)
        self._source.delivered, self._source.waited = link.delivered, link.waited
        self._source.more()
