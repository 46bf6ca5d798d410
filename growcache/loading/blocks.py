"""Blocks: the rows of one or more batches, gathered, transformed, labelled and cut."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from growcache.errors import CorruptShardError
from growcache.loading.buffers import Allocate
from growcache.loading.delivered_rows import BatchRows, irregular_batches
from growcache.loading.framework import Booleans, Bytes, Framework, Transfer
from growcache.loading.gather import Gatherer, MappedRows, ShardPlaces
from growcache.loading.options import VALID_FIELD, LoaderOptions
from growcache.loading.plan import PassPosition
from growcache.loading.ragged import Column, Ragged, RaggedStyler
from growcache.loading.shared_memory import SharedSender
from growcache.loading.snapshot import Snapshot
from growcache.loading.transform import (
    BlockTransform,
    Executor,
    TransformSchema,
    blame_function,
    function_arguments,
    pickle_function,
)
from growcache.loading.transform_workers import ProcessExecutor, WorkerSetup
from growcache.loading.windows import Piece, SkippedRows, count_rows, position_after, rows_after
from growcache.schema import Array, Origin, Schema

BLOCK_BATCHES = 128

# A block is delivered only after all of it is transformed. Samples of at least this size are
# transformed a batch at a time; smaller ones need several batches to be worth it.
LARGE_ROW_BYTES = 64 * 1024
TRANSFORMED_BYTES = 8_000_000
TRANSFORMED_BATCHES = 64

# Of the first block for a waiting consumer, unless batches are larger: as much as is copied in
# the time of a block's other work.
FIRST_BYTES = 2_000_000
# From block to block. Each needs a buffer for a full block, so they should be few.
RAMP_FACTOR = 4


def batches_per_block(
    sample_bytes: int, batch_size: int, block_bytes: int, *, transformed: bool = False
) -> int:
    """Return the number of batches to gather together.

    >>> batches_per_block(64 * 1024, 64, 35_000_000), batches_per_block(3072, 64, 35_000_000)
    (8, 128)
    >>> [batches_per_block(n, 64, 35_000_000, transformed=True) for n in (256 * 1024, 64)]
    [1, 64]
    """
    if transformed and sample_bytes >= LARGE_ROW_BYTES:
        return 1
    batches, nbytes = BLOCK_BATCHES, block_bytes
    if transformed:
        batches, nbytes = TRANSFORMED_BATCHES, TRANSFORMED_BYTES
    return max(1, min(batches, nbytes // max(1, sample_bytes * batch_size)))


class BlockSizeRamp:
    """Sizes of blocks.

    They are small while the consumer waits, because a block is delivered whole.
    """

    def __init__(self, batch_size: int, least: int, most: int) -> None:
        self._batch_size = batch_size
        self._least = min(least, most)
        self._most = most
        self._batches = most

    @property
    def rows(self) -> int:
        return self._batches * self._batch_size

    def begin(self, filled: int) -> None:
        self._batches = min(self._batches, filled // self._batch_size + self._least)

    def grow(self) -> None:
        self._batches = min(self._most, RAMP_FACTOR * self._batches)


Batch: TypeAlias = dict[str, Any]

# A named column of all rows, or each batch's values of a ragged field.
BlockPart: TypeAlias = tuple[str, Array] | deque[Batch]

# Numbers of some shards, and the index of each row's shard among them.
RowShards: TypeAlias = tuple[Sequence[int], ShardPlaces]


@dataclass(slots=True)
class Block:
    """Consecutive batches of an epoch.

    Users of `batches` keep none, because memory is recycled.
    """

    epoch: int
    rows: int  # of all its batches
    parts: list[BlockPart]  # columns from which batches are cut, in the order of the fields
    drawn: list[RowShards]  # shard of each row
    counts: dict[int, int]  # rows per shard
    nbytes: int
    marks: list[PassPosition]  # position after each batch
    lost: list[int]  # planned rows before each batch that could not be read
    transform_schema: TransformSchema
    irregular: dict[int, BatchRows] | None = None  # of some batches, for a journal
    seconds: float = 0.0  # time of the gather, without waits for the thread that shares it
    # Of these, in which the thread neither ran nor waited for a disk.
    stalled_seconds: float = 0.0
    thread: int = 0  # kernel's number of the thread that made it; 0 for another process
    batches: Iterator[Any] = field(default_factory=lambda: iter(()))


def count_per_shard(drawn: Iterable[RowShards], rows: int = sys.maxsize) -> dict[int, int]:
    found: dict[int, int] = {}
    for numbers, places in drawn:
        # Sorting the numbers of all rows would take five times as long.
        for number, count in zip(numbers, np.bincount(places[:rows]).tolist(), strict=False):
            if count:
                found[number] = found.get(number, 0) + count
        rows = max(0, rows - len(places))
    return found


def _decided_schema(transform_schema: TransformSchema | None) -> Schema | None:
    if transform_schema is None or transform_schema.transformed is None:
        return None
    return Schema.from_json(transform_schema.transformed)


def _executor(
    options: LoaderOptions,
    framework: Framework,
    stopped: Callable[[], bool],
    shared_sender: SharedSender | None,
) -> tuple[Executor | None, Allocate, Allocate]:
    count, function = options.num_workers, options.transform
    if function is None or not count:
        return None, framework.allocate, framework.allocate
    shared = shared_sender or SharedSender()
    setup = WorkerSetup(
        pickle_function(function, function_arguments(function)),
        options.seed,
        sys.argv,
        options.timeout_seconds,
    )
    executor = ProcessExecutor(count, setup, shared, stopped)
    readable = functools.partial(shared.allocate, to=executor.connections)
    # Their results are delivered. A trainer in another process maps these buffers, too.
    writable = functools.partial(
        shared.allocate, to=lambda: [*executor.connections(), *shared.receivers]
    )
    if framework.transfer is not None:
        writable = functools.partial(_allocate_locked, writable, framework.transfer)
    return executor, readable, writable


def _allocate_locked(
    allocate: Allocate, transfer: Transfer, nbytes: int, kept: list[Bytes] | None
) -> Bytes:
    base = allocate(nbytes, kept)
    if kept is not None:
        transfer.lock(base)
    return base


class BlockAssembler:
    """Makes blocks from pieces, in one thread."""

    def __init__(
        self,
        options: LoaderOptions,
        snapshot: Snapshot,
        framework: Framework,
        stopped: Callable[[], bool],
        transform_schema: TransformSchema | None = None,
        shared_sender: SharedSender | None = None,
    ) -> None:
        schema = options.chosen(snapshot.schema)
        nbytes = snapshot.sample_bytes if schema.is_ragged else schema.nbytes
        batch, transformed = options.batch_size, options.transform is not None
        most = batches_per_block(nbytes, batch, framework.block_bytes, transformed=transformed)
        few = 1 if transformed else FIRST_BYTES // max(1, nbytes * batch)
        # Small blocks would need more buffers.
        if framework.batches_at_once > 1 and not transformed:
            few = most
        self._ramp = BlockSizeRamp(batch, max(1, few), most)
        self.block_rows = batch * most
        self._batches_at_once = framework.batches_at_once
        executor, readable, writable = _executor(options, framework, stopped, shared_sender)
        self._gatherer = Gatherer(
            schema, self.block_rows, replace(framework, allocate=readable)
        )
        self._options = options
        self._styler = RaggedStyler(options.ragged, framework)
        self._transform = (
            BlockTransform(
                *(
                    options.transform,
                    options.seed,
                    batch * most,
                    schema,
                    _decided_schema(transform_schema),
                    executor,
                ),
                allocate=writable,
                allocate_ragged=framework.allocate,
                timeout_seconds=options.timeout_seconds,
                stopped=stopped,
            )
            if options.transform
            else None
        )
        self.losses = SkippedRows()
        self._all_pieces: list[Piece] = []
        self._valid: list[Booleans] = []
        self._drawn: list[RowShards] = []
        self._places: list[tuple[int, int]] = []
        self._origins: list[Origin] = []
        self._pieces: list[Piece] = []  # of this rank

    @property
    def rows(self) -> int:
        return self._ramp.rows

    def shrink(self) -> None:
        # The results for the first block determine the fields, so they should be many.
        if self._transform is None or self._transform.schema is not None:
            self._ramp.begin(self._gatherer.filled)

    def add(self, pieces: list[Piece], all_pieces: list[Piece]) -> bool:
        """Append this rank's rows of one pass.

        Returns False if none was appended, because shards are damaged. These are marked.
        """
        before = self._gatherer.filled
        parts = [window.part(start, stop) for window, start, stop in pieces]
        if not self._copied(parts):
            self._gatherer.rewind(before)
            return False
        self._all_pieces += all_pieces
        for piece, rows in zip(pieces, parts, strict=True):
            self.losses.note(piece, before)
            before += len(rows)
            self._drawn.append((piece.window.numbers, rows.places))
            self._pieces.append(piece)
            if self._options.marks_valid:
                self._valid.append(_valid_rows(piece))
            if self._transform is not None:
                self._note(self._transform, piece)
        return True

    def _copied(self, parts: list[MappedRows]) -> bool:
        try:
            for rows in parts:
                self._gatherer.add(rows)
        except CorruptShardError:
            if not any(rows.damaged() for rows in parts):
                raise
            return False
        return all(rows.shards.whole() or not rows.damaged() for rows in parts)

    def _note(self, transform: BlockTransform, piece: Piece) -> None:
        window, start, stop = piece
        number = window.plan.pass_number
        self._places += [(number, p) for p in window.positions(start, stop).tolist()]
        if transform.takes_origin:
            places, rows = window.located(start, stop)
            self._origins += [
                window.snapshot.sidecar(window.numbers[place]).origin(row)
                for place, row in zip(places.tolist(), rows.tolist(), strict=True)
            ]

    def finish(self, epoch: int) -> Block:
        rows = self._gatherer.filled
        columns: Mapping[str, Column] = self._gatherer.finish()
        drawn, places, origins = self._drawn, self._places, self._origins
        pieces = self._pieces
        size = self._options.batch_size
        ends = [min(start + size, rows) for start in range(0, rows, size)]
        step, all_pieces = (
            size * self._options.ranks.local_world_size,
            count_rows(self._all_pieces),
        )
        last = rows_after(
            self._all_pieces, [min(step * n, all_pieces) for n in range(1, len(ends) + 1)]
        )
        marks = [position_after(place) for place in last]
        lost = self.losses.before(last, size)
        valid = self._valid
        journaled = self._options.journal is not None
        irregular = irregular_batches(pieces, size, step) if journaled else None
        self._begin()
        self._ramp.grow()
        if self._transform is not None:
            columns = self._transform.run(
                columns, places, origins or None, functools.partial(_row_name, pieces)
            )
        if valid:
            columns = {**columns, VALID_FIELD: np.concatenate(valid)}
        cuts = [*ends[:-1][self._batches_at_once - 1 :: self._batches_at_once], rows]
        parts = [self._part(name, column, cuts) for name, column in columns.items()]
        nbytes = sum(column.nbytes for column in columns.values())
        counts = count_per_shard(drawn)
        return Block(
            *(epoch, rows, parts, drawn, counts, nbytes, marks, lost, self._transform_schema()),
            irregular=irregular,
        )

    def _part(self, name: str, column: Column, ends: list[int]) -> BlockPart:
        if not isinstance(column, Ragged):
            return name, column
        edges = zip([0, *ends[:-1]], ends, strict=True)
        return deque(self._styler.batch(column.part(*edge)) for edge in edges)

    def _transform_schema(self) -> TransformSchema:
        schema = self._transform.schema if self._transform is not None else None
        return TransformSchema(None if schema is None else schema.to_json())

    def discard(self) -> None:
        self._gatherer.finish()
        self.losses.discard()
        self._begin()

    def _begin(self) -> None:
        self._all_pieces, self._valid = [], []
        self._drawn = []
        self._places, self._origins, self._pieces = [], [], []

    def close(self) -> None:
        if self._transform is not None:
            self._transform.close()


class BatchCutter:
    def __init__(self, options: LoaderOptions, framework: Framework) -> None:
        self._size = options.batch_size * framework.batches_at_once
        self._function = options.batch_transform
        self._deliver = framework.deliver
        self._transfer = framework.transfer

    def cut(self, block: Block) -> Block:
        block.batches = self._batches(block.parts, block.rows)
        block.parts = []
        return block

    def cut_now(self, block: Block, wanted: Callable[[], bool]) -> bool:
        """Make all batches now; return False if the epoch was left meanwhile."""
        if self._transfer is not None:
            self._transfer.enter()
        batches = self.cut(block).batches
        made = deque[Any]()
        while wanted():
            try:
                made.append(next(batches))
            except StopIteration:
                block.batches = (made.popleft() for _ in range(len(made)))
                return True
        return False

    def _batches(self, parts: list[BlockPart], rows: int) -> Iterator[Any]:
        for start in range(0, rows, self._size):
            yield self._batch(parts, start, start + self._size)

    def _batch(self, parts: list[BlockPart], start: int, stop: int) -> Any:
        arrays: Batch = {}
        for part in parts:
            if isinstance(part, deque):
                arrays |= part.popleft()
            else:
                arrays[part[0]] = part[1][start:stop]
        batch = {name: self._delivered(name, value) for name, value in arrays.items()}
        made = self._transformed(batch)
        return made if self._transfer is None else self._transfer.send(made, arrays)

    def _transformed(self, batch: Batch) -> Any:
        if self._function is None:
            return batch
        with blame_function("batch_transform", self._function):
            return self._function(batch)

    def _delivered(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [self._deliver(name, v) if isinstance(v, np.ndarray) else v for v in value]
        return self._deliver(name, value)


def _row_name(pieces: list[Piece], row: int) -> str:
    for window, start, stop in pieces:
        if row < stop - start:
            places, rows = window.located(start + row, start + row + 1)
            number = window.numbers[int(places[0])]
            try:
                origin = window.snapshot.sidecar(number).origin(int(rows[0]))
            except (CorruptShardError, OSError):
                return ""
            return f"{origin.key} [{origin.start}:{origin.stop}] (shard {number}:{rows[0]})"
        row -= stop - start
    return ""


def _valid_rows(piece: Piece) -> Booleans:
    """Return bool [n]: False for padding and substitutes."""
    window, start, stop = piece
    if window.valid is None:
        return np.ones(stop - start, np.bool_)
    return window.valid[start:stop]
