"""The loaders for PyTorch, and row copies by torch, which release the GIL once for many rows."""

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

# Rows with fewer elements are copied by memcpy. Larger rows go through a tensor iterator, which
# is a third slower and starts a parallel region per row (at::internal::GRAIN_SIZE).
GRAIN_ELEMENTS = 32_768
SMALLEST_CHUNK = 2048
# NumPy releases the GIL for computations on more numbers than this.
UNLOCKED_NUMBERS = 500


def take_rows(memory: Bytes, starts: Integers, out: Bytes) -> None:
    nbytes = out.shape[1]
    chunk = _chunk_bytes(nbytes)  # long rows are copied as several short ones
    index = _chunk_starts(starts, nbytes, chunk)
    # A view with a row at every byte. NumPy makes it, because each operation of torch releases
    # the GIL, and a busy loop then keeps it for as long as a copy takes.
    shape = (max(0, len(memory) - chunk + 1), chunk)
    table = np.ndarray(shape, np.uint8, memory, strides=(1, 1))
    target = torch.from_numpy(out.reshape(-1, chunk))
    torch.index_select(torch.from_numpy(table), 0, torch.from_numpy(index), out=target)


def _chunk_starts(starts: Integers, nbytes: int, chunk: int) -> Integers:
    """Return the start of each chunk of all rows: int64 [chunks]."""
    if chunk == nbytes:
        return starts
    before = np.arange(0, nbytes, chunk)
    index = np.empty((len(starts), len(before)), np.int64)
    if len(starts) > UNLOCKED_NUMBERS:
        np.add(starts[:, None], before, out=index)
    else:  # column by column NumPy keeps the GIL
        for column, by in enumerate(before.tolist()):
            np.add(starts, by, out=index[:, column])
    return index.reshape(-1)


@functools.lru_cache(maxsize=256)
def _chunk_bytes(nbytes: int) -> int:
    """Return the largest divisor of the row size below the grain, or else the row size."""
    if nbytes < GRAIN_ELEMENTS:
        return nbytes
    pieces = range(-(-nbytes // (GRAIN_ELEMENTS - 1)), nbytes // SMALLEST_CHUNK + 1)
    return next((nbytes // n for n in pieces if nbytes % n == 0), nbytes)


def take_slices(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> None:
    join_parts(slices(memory, starts, lengths), out)


def join_parts(parts: Sequence[Bytes], out: Bytes) -> None:
    """Join byte arrays.

    Short parts are joined by NumPy, because making their tensors takes as long as the copy.
    Empty parts are left out, because `torch.cat` has no fast path with them.
    """
    if len(out) < LONG_ROW_BYTES * len(parts):
        np.concatenate(parts, out=out)
        return
    tensors = [torch.from_numpy(part) for part in parts if len(part)]
    torch.cat(tensors, out=torch.from_numpy(out))


def copy_in_this_thread_alone() -> None:
    """Keep torch's operations of the calling thread out of its thread pool.

    Waiting for a second thread takes ten times as long if that thread is preempted, or busy
    with the user's step. OpenMP keeps the number of threads per thread; `torch.set_num_threads`
    would change it for all.
    """
    torch.get_num_threads()  # torch sets the number at a thread's first request
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
    from growcache.torch.node_group import node_group  # not every build of torch has gloo

    return node_group(options)


class EpochLoader(FromDataset, Loader):
    """Batches from a growing cache.

    Each iteration is a new epoch over the shards cached by then.

    Batches are dicts of field name to tensor ``[batch, *shape]``, in the dtype of the schema.

    The next epoch's snapshot, plan and first batches are prepared before the current epoch
    ends. You may keep tensors, because their memory is recycled only after the last reference
    is gone. A loader pickles as its arguments. A new iteration ends the previous one.

    Example::

        from growcache.torch import EpochLoader

        with EpochLoader("/data/cache", batch_size=64) as loader:
            for epoch in range(90):
                for batch in loader:
                    step(batch["x"], batch["y"])
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
# Trainers that rebuild a loader, as Lightning does for predictions, pass the attributes of the
# old one.
REMADE_ARGUMENTS = ("dataset", "sampler", "batch_sampler")


class BatchRow(NamedTuple):
    batch: Any
    row: int


class RowDataset(IterableDataset[BatchRow]):
    """The rows of a loader's batches, which `collate_rows` puts together again without a copy.

    A trainer can therefore make its own `DataLoader`, with this batch size and ``collate_fn``.
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
        """Return the loader's position for `StatefulDataLoader`; see `EpochLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another loader's position; see `EpochLoader.load_state_dict`."""
        refuse_torch_worker()
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        """Return the number of samples that an epoch delivers to this rank."""
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
    """An `EpochLoader` that is a `torch.utils.data.DataLoader`, for trainers that require one.

    The arguments are those of `EpochLoader` (see ``help(EpochLoader)``). ``samples_per_epoch``
    or ``fixed`` is required, because trainers ask for the length once and keep it. Each
    iteration is the next epoch.

    No worker processes of torch are used, because the batches arrive complete, as from
    `EpochLoader`. The attribute ``num_workers`` is therefore always 0. The argument
    ``num_workers`` counts growcache's own processes.

    The loader divides the samples among the ranks of a job itself. Lightning does not shard
    iterable datasets, and Accelerate's ``prepare`` returns this loader unchanged. Use
    ``device`` for batches on a device.

    Attributes:
        dataset: An `IterableDataset` of the rows of the batches.
        batch_size: Samples per batch of one rank.
        use_stateful_dataloader: Accelerate's ``save_state`` saves the position of this loader.

    Example::

        from growcache.torch import EpochDataLoader

        train = EpochDataLoader("/data/cache", batch_size=64, samples_per_epoch=100_000)
        trainer.fit(model, train)
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
            # Trainers count steps and do not ask again. So the epoch ends with its last batch,
            # both in the report and in the state that is saved while that batch is trained on.
            if not left:
                next(batches, None)
            yield batch
            del batch

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        With ``fixed`` this waits for the whole cache.
        """
        return len(self.loader)

    @property
    def classes(self) -> dict[str, list[str]]:
        """Names of classes by field; see `EpochLoader.classes`."""
        return self.loader.classes

    @property
    def report(self) -> Report:
        """Figures about the delivered samples; see `EpochLoader.report`."""
        return self.loader.report

    def metrics(self, prefix: str = "data/") -> dict[str, float]:
        """Return the numbers of the report by name; see `EpochLoader.metrics`."""
        return self.loader.metrics(prefix)

    def state_dict(self) -> dict[str, Any]:
        """Return this loader's position; see `EpochLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], missing: MissingShards = "refetch"
    ) -> None:
        """Continue from another loader's position; see `EpochLoader.load_state_dict`.

        A state that was saved during the last batch of an epoch starts the next epoch, whereas
        with an `EpochLoader` an empty rest comes first.
        """
        self.loader.load_state_dict(state, missing)

    def close(self) -> None:
        """End threads and processes, and release the snapshots.

        A later iteration starts them anew.
        """
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
            "length once; EpochLoader does not need them",
            code="GC601",
        )
    return loader
