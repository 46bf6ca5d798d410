"""The loaders of PyTorch, and copies of rows by torch's operations, which release the GIL once for many."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from growcache.errors import ConfigError, FormatError
from growcache.loading.agreement import Agreement
from growcache.loading.framework import (
    LONG_ROW_BYTES,
    Bytes,
    Framework,
    Integers,
    Transfer,
    slices,
)
from growcache.loading.loader import Loader, refuse_torch_worker
from growcache.loading.options import LoaderOptions
from growcache.loading.report import Report
from growcache.loading.resume import MissingShards
from growcache.sampling.from_dataset import FromDataset
from growcache.torch.transfer import call_loaded, transfer_to

# Rows with fewer elements are copied by memcpy, those with more through a tensor iterator
# that is a third slower and starts a parallel region per row (at::internal::GRAIN_SIZE).
GRAIN_ELEMENTS = 32_768
SMALLEST_CHUNK = 2048
# NumPy releases the GIL to compute more numbers.
UNLOCKED_NUMBERS = 500


def take_rows(memory: Bytes, starts: Integers, out: Bytes) -> None:
    nbytes = out.shape[1]
    chunk = _chunk_bytes(nbytes)  # long rows are copied as many short ones
    index = _chunk_starts(starts, nbytes, chunk)
    # A view whose rows begin at every single byte. NumPy makes it, because each operation of
    # torch's releases the GIL, and a busy loop then keeps it for as long as a copy takes.
    shape = (max(0, len(memory) - chunk + 1), chunk)
    table = np.ndarray(shape, np.uint8, memory, strides=(1, 1))
    target = torch.from_numpy(out.reshape(-1, chunk))
    torch.index_select(torch.from_numpy(table), 0, torch.from_numpy(index), out=target)


def _chunk_starts(starts: Integers, nbytes: int, chunk: int) -> Integers:
    """Return the first place of each chunk of all rows: int64 [chunks]."""
    if chunk == nbytes:
        return starts
    before = np.arange(0, nbytes, chunk)
    index = np.empty((len(starts), len(before)), np.int64)
    if len(starts) > UNLOCKED_NUMBERS:
        np.add(starts[:, None], before, out=index)
    else:  # column by column it does not
        for column, by in enumerate(before.tolist()):
            np.add(starts, by, out=index[:, column])
    return index.reshape(-1)


@functools.lru_cache(maxsize=256)
def _chunk_bytes(nbytes: int) -> int:
    """Return the largest divisor of a row below the grain, or the row where it has none."""
    if nbytes < GRAIN_ELEMENTS:
        return nbytes
    pieces = range(-(-nbytes // (GRAIN_ELEMENTS - 1)), nbytes // SMALLEST_CHUNK + 1)
    return next((nbytes // n for n in pieces if nbytes % n == 0), nbytes)


def take_slices(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> None:
    join_parts(slices(memory, starts, lengths), out)


def join_parts(parts: Sequence[Bytes], out: Bytes) -> None:
    """Tensors of short parts take as long as the copy; empty ones cost `torch.cat` its fast path."""
    if len(out) < LONG_ROW_BYTES * len(parts):
        np.concatenate(parts, out=out)
        return
    tensors = [torch.from_numpy(part) for part in parts if len(part)]
    torch.cat(tensors, out=torch.from_numpy(out))


def copy_in_this_thread_alone() -> None:
    """Keep torch's operations of the calling thread out of its pool of threads.

    A wait for a second thread that is preempted, or busy with the user's step, costs a factor of
    ten. OpenMP keeps the number per thread; `torch.set_num_threads` would change all threads.
    """
    torch.get_num_threads()  # torch sets the number when a thread first asks for it
    call_loaded("gomp|iomp5|omp", "omp_set_num_threads", 1)


def _tensor(name: str, array: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise FormatError(
            f"field {name!r} has dtype {array.dtype}, which torch does not have; cast it in "
            "sampling.transform or in the loader's transform",
            code="GC306",
        ) from None


def _process_group() -> tuple[int, int] | None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _agreement(options: LoaderOptions) -> Agreement:
    from growcache.torch.node_group import node_group  # not every torch is built with gloo

    return node_group(options)


class EpochLoader(FromDataset, Loader):
    """Batches from a growing cache; every iteration is a new epoch over the shards cached by then.

    The next epoch's snapshot, plan and first batches are made before the current epoch ends.
    Tensors may be kept: their memory is recycled only once nothing refers to it. A loader
    pickles as its arguments. Iterating anew ends the iteration before it.

    Yields dicts of field name to tensor ``[batch, *shape]`` in the dtype of the schema.
    """

    framework = Framework(
        *(
            take_rows,
            take_slices,
            join_parts,
            _tensor,
            copy_in_this_thread_alone,
            _process_group,
        ),
        frees_lock=True,
        agreement=_agreement,
    )

    def _transfer_to(self, device: Any) -> Transfer | None:
        return None if device is None else transfer_to(device)


P = ParamSpec("P")
# Trainers that rebuild a loader, as Lightning does to predict, pass the old one's attributes.
REMADE_ARGUMENTS = ("dataset", "sampler", "batch_sampler")


class BatchRow(NamedTuple):
    batch: Any
    row: int


class RowDataset(IterableDataset[BatchRow]):
    """The rows of a loader's batches, which `collate_rows` puts together without a copy.

    So a trainer may make a `DataLoader` of its own, with this batch size and ``collate_fn``.
    """

    def __init__(self, loader: EpochLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[BatchRow]:
        refuse_torch_worker()
        share = self.loader.rest_share()
        assert share is not None
        left = share.delivered
        for batch in self.loader:
            rows = min(self.loader.options.batch_size, left)
            yield from (BatchRow(batch, row) for row in range(rows))
            left -= rows
            del batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands, as `StatefulDataLoader` asks; see `EpochLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood; see `EpochLoader.load_state_dict`."""
        refuse_torch_worker()
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        """Return the samples that an epoch of this rank delivers."""
        share = self.loader.rank_share()
        assert share is not None
        return share.delivered


def collate_rows(rows: list[BatchRow]) -> Any:
    batch = rows[0].batch
    if any(row.batch is not batch or row.row != i for i, row in enumerate(rows)):
        raise ConfigError(
            "expected the rows of one batch: a DataLoader over an EpochDataLoader's dataset "
            "needs its batch_size and drop_last, and no other ranks than it has itself",
            code="GC601",
        )
    return batch


def _with_arguments_of(
    base: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    signature = inspect.signature(base)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in REMADE_ARGUMENTS
    ]
    signature = signature.replace(parameters=[*signature.parameters.values(), *more])

    def decorate(method: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        method.__signature__ = signature  # type: ignore[attr-defined]
        return method

    return decorate


class EpochDataLoader(DataLoader[Any]):
    """An `EpochLoader` that is a `torch.utils.data.DataLoader`, for trainers that ask for one.

    It takes the arguments of `EpochLoader` (see ``help(EpochLoader)``), and needs
    ``samples_per_epoch`` or ``fixed``: trainers ask for the length once and keep the answer.
    Each iteration is the next epoch. There are no worker processes of torch: the batches
    come ready, as those of `EpochLoader` do. So the attribute ``num_workers`` is 0, whatever
    the argument of that name, which counts processes of growcache's own.

    It deals with the ranks of a job itself. Lightning shards no iterable dataset, and
    Accelerate's ``prepare`` returns this loader as it is; for a device give ``device``.

    Attributes:
        dataset: an `IterableDataset` of the rows of the batches.
        batch_size: of one rank.
        use_stateful_dataloader: Accelerate's ``save_state`` saves where this one stands.
    """

    use_stateful_dataloader = True
    _is_accelerate_prepared = True

    @_with_arguments_of(EpochLoader.__init__)
    def __init__(
        self,
        *args: Any,
        dataset: RowDataset | None = None,
        sampler: None = None,
        batch_sampler: None = None,
        **kwargs: Any,
    ) -> None:
        rows = RowDataset(_with_length(*args, **kwargs)) if dataset is None else dataset
        options = rows.loader.options
        self.path = options.path
        super().__init__(
            rows,
            batch_size=options.batch_size,
            drop_last=not options.keep_last,
            collate_fn=collate_rows,
        )

    @property
    def loader(self) -> EpochLoader:
        """The loader that makes the batches."""
        assert isinstance(self.dataset, RowDataset)
        return self.dataset.loader

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over the batches of the next epoch."""
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        share = self.loader.rest_share()
        assert share is not None
        left, batches = share.steps, iter(self.loader)
        for batch in batches:
            left -= 1
            # Trainers count steps and do not ask again. So the epoch ends with its last batch, in
            # the report and in the state while that batch is trained on.
            if not left:
                next(batches, None)
            yield batch
            del batch

    def __len__(self) -> int:
        """Return the batches of an epoch; for ``fixed`` this waits for the whole cache."""
        return len(self.loader)

    @property
    def classes(self) -> dict[str, list[str]]:
        """The names of classes; see `EpochLoader.classes`."""
        return self.loader.classes

    @property
    def report(self) -> Report:
        """Counts of deliveries; see `EpochLoader.report`."""
        return self.loader.report

    def metrics(self, prefix: str = "data/") -> dict[str, float]:
        """Return the numbers of the report by name; see `EpochLoader.metrics`."""
        return self.loader.metrics(prefix)

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands; see `EpochLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], missing: MissingShards = "refetch"
    ) -> None:
        """Go on where another loader stood; see `EpochLoader.load_state_dict`.

        A state that was saved while the last batch of an epoch was trained on begins the next
        epoch, where that of an `EpochLoader` has an empty rest.
        """
        self.loader.load_state_dict(state, missing)

    def close(self) -> None:
        """End threads and processes, and free the snapshots; a later iteration starts anew."""
        self.loader.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, batch_size={self.batch_size})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_loader, (type(self), self.path, self.batch_size, self.dataset)


def _unpickle_loader(
    kind: type[EpochDataLoader], path: Any, size: int, rows: RowDataset
) -> EpochDataLoader:
    return kind(path, batch_size=size, dataset=rows)  # type: ignore[call-arg]


def _with_length(*args: Any, **kwargs: Any) -> EpochLoader:
    loader = EpochLoader(*args, **kwargs)
    if not loader.options.fixed and loader.options.samples_per_epoch is None:
        raise ConfigError(
            "EpochDataLoader needs samples_per_epoch, or fixed=True: a trainer asks for its "
            "length once; EpochLoader goes without",
            code="GC601",
        )
    return loader
