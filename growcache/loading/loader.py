"""The loader that the loaders of all frameworks share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

from growcache.errors import ConfigError
from growcache.loading.consumer import Consumer
from growcache.loading.framework import NUMPY, Framework, Transfer
from growcache.loading.maps import Verify
from growcache.loading.options import (
    Gather,
    LoaderOptions,
    Ranks,
    RankShare,
    field_names,
    find_ranks,
    unknown_field,
)
from growcache.loading.ragged import RaggedStyle
from growcache.loading.report import Report
from growcache.loading.resume import (
    MISSING_SHARDS,
    MissingShards,
    Position,
    epoch_rows_left,
)
from growcache.loading.transform import TIMEOUT_SECONDS
from growcache.loading.waiting import cached_classes, wait_for_samples


def refuse_torch_worker() -> None:
    """Raise ConfigError in a worker process of torch's `DataLoader`."""
    module = sys.modules.get("torch.utils.data")
    worker = None if module is None else module.get_worker_info()
    if worker is not None:
        raise ConfigError(
            f"a DataLoader with num_workers={worker.num_workers} iterates over a growcache "
            "loader in its worker processes, each of which would deliver every sample; "
            "expected num_workers=0, because growcache itself makes batches while the loop "
            "runs. For trainers that ask for a DataLoader (Lightning, Accelerate, Hugging "
            "Face), use growcache.torch.EpochDataLoader. For processes that run a transform, "
            "set num_workers of the growcache loader",
            code="GC601",
        )


class Loader:
    """Epochs over a growing cache. The loader of a framework decides the type of the batches.

    Attributes:
        framework: The functions that the framework's module provides.
    """

    framework: ClassVar[Framework] = NUMPY

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int,
        min_samples: int = 1000,
        samples_per_epoch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        fixed: bool = False,
        transform: Callable[..., Any] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        fields: Sequence[str] | None = None,
        as_tuple: Sequence[str] | None = None,
        ragged: RaggedStyle = "offsets",
        rank: int | None = None,
        world_size: int | None = None,
        job: str = "default",
        num_workers: int = 0,
        gather: Gather = "auto",
        verify: Verify = "first",
        device: Any = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        """Check the arguments. Threads and processes start with the first iteration.

        Args:
            path: Path of the cache directory. It need not exist yet.
            batch_size: Samples per batch.
            min_samples: Samples that must be cached before an epoch starts, or the whole
                population if that is smaller.
            samples_per_epoch: Samples of an epoch over all ranks, in whole batches unless
                ``drop_last`` is False. An epoch is then a part of a pass over the cache, or
                several passes; the next epoch continues where it ended. With None an epoch is
                one pass over everything that is cached, so epochs grow with the cache.
            seed: Seed of the order and of the random generators of ``transform``.
            shuffle: False delivers shards by number, and samples in the order in which they
                were drawn.
            drop_last: Leave out the last batch if it is smaller than ``batch_size``.
            fixed: Wait until the cache is complete. Every epoch is then one pass in order, and
                its last batch is kept. Use it for validation.
            transform: ``function(sample, rng, origin)``, called at every delivery, in threads
                or in the processes of ``num_workers``. ``sample`` is a dict that the function
                may change: its arrays are copies, and bytes and str are as cached. ``rng`` is a
                NumPy generator seeded by (seed, pass, position), and ``origin`` the sample's
                `growcache.Origin`. The function may omit both; they are passed by name. It
                returns a dict of arrays, whose shapes must be equal for all samples. Exceptions
                are bytes, str, and fields named like a ragged field of the cache.
            batch_transform: ``function(batch)``, called with each batch as a dict, before
                ``as_tuple``. Its result is delivered. It runs in the thread that makes batches,
                so that the loop does not wait for it.
            fields: Names of the fields to deliver; other fields are not read. None delivers
                all.
            as_tuple: Names of fields. Batches are tuples of these fields, in this order,
                instead of dicts.
            ragged: How a ragged field ``x`` is delivered. ``"offsets"``: ``x``
                ``[total, *inner]`` holds all values back to back, and ``x_offsets`` int64
                ``[batch + 1]`` their places: value i is ``x[x_offsets[i]:x_offsets[i + 1]]``.
                If other dimensions than the first are ragged, ``x`` is flat, the offsets count
                its items, and ``x_shapes`` int64 ``[batch, rank]`` has the shapes. ``"pad"``:
                ``x`` ``[batch, longest, *inner]`` has zeros after each value, and ``x_lengths``
                the sizes, int64 ``[batch]``, or ``[batch, k]`` for k ragged dimensions.
                ``"list"``: ``x`` is a list of arrays. Bytes are delivered as uint8, and in
                lists as bytes. Strings are always in lists, which no loss function accepts;
                ``classes`` of ``source.labels`` replaces texts by numbers.
            rank: Rank of this process among the ``world_size`` of its job. All ranks make the
                same number of steps, and together they deliver the samples that one process
                would deliver. With None, PyTorch's loader asks torch.distributed; without a
                process group the variables ``RANK`` and ``WORLD_SIZE`` decide. ``LOCAL_RANK``
                and ``LOCAL_WORLD_SIZE`` tell which ranks share this machine and its cache.
                Growing epochs over several machines need torch.distributed, by which the ranks
                agree on the length of an epoch. With ``fixed``, or without ``drop_last``,
                batches have a field ``_valid``, bool ``[batch]``, which is False for samples
                that only fill up a batch.
            world_size: Number of ranks; give it together with ``rank``. 1 makes a loader for
                this process alone.
            job: Name under which uses are counted. Each training run on a cache needs its own.
            num_workers: Number of processes that call ``transform`` and do nothing else. With
                0, threads call it, which is as fast if the function releases the interpreter's
                lock. The batches are the same. Functions of modules are pickled by name, and
                those of scripts and notebooks by value, so no ``__main__`` guard is needed.
            gather: Where batches are put together. ``"thread"``: in a thread of this process.
                ``"process"``: in a separate process, through shared memory, for loops whose own
                Python code keeps the interpreter's lock from that thread. ``"auto"``: starts
                with the thread, and changes when measurements favour the process.
            verify: ``"first"`` checks a shard when this process first maps it, ``"always"`` in
                every pass.
            device: Device for the batches, such as ``"cuda"`` or ``"cuda:1"``; only PyTorch's
                loader accepts one. Batches are copied to the device concurrently with the loop,
                after ``batch_transform``. Large columns that ``batch_transform`` passes on
                unchanged are copied from page-locked memory. Up to 360 MB of batches are on the
                device (176 MB with ``gather="process"``), or five batches if these are larger,
                including the loop's. ``"cuda"`` is the device that is current in the loop's
                thread at its first iteration. None leaves batches in memory. This has not run
                on a GPU yet.
            timeout_seconds: Seconds that ``transform`` may take for a sample. Then a warning
                names the sample, and training continues to wait for it.
            journal: Path of a file to which the loader appends, so that `growcache.replay` can
                deliver any batch again. It takes 24 bytes per shard and pass, and once a few
                tens of bytes per object of the store. Each of several ranks writes its own
                file, named by its rank.

        Raises:
            ConfigError: An argument is not valid, or two arguments contradict each other.
        """
        self._as_tuple = field_names("as_tuple", as_tuple)
        self._rank_arguments = (rank, world_size)
        self._device = device
        self._options = LoaderOptions(
            path=path,
            batch_size=batch_size,
            min_samples=min_samples,
            samples_per_epoch=samples_per_epoch,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            fixed=fixed,
            transform=transform,
            batch_transform=batch_transform,
            fields=field_names("fields", fields),
            ragged=ragged,
            job=job,
            num_workers=num_workers,
            gather=gather,
            verify=verify,
            timeout_seconds=timeout_seconds,
            journal=journal,
            ranks=self._ranks(),
        )
        # Reset by the next iteration.
        self._loaded: tuple[Position, MissingShards] | None = None
        self._transfer = self._transfer_to(device)
        self._consumer = self._new_consumer()

    def _transfer_to(self, device: Any) -> Transfer | None:
        """Return the transfer to a device. Frameworks that have devices override it."""
        if device is not None:
            raise ConfigError(
                f"device: arrays are in memory, found {device!r}; growcache.torch.EpochLoader "
                "delivers on devices",
                code="GC601",
            )
        return None

    def _new_consumer(self) -> Consumer:
        framework, transfer = self.framework, self._transfer
        if transfer is not None:
            framework = replace(framework, transfer=transfer, allocate=transfer.allocate)
        return Consumer(self._options, framework)

    def _ranks(self) -> Ranks:
        return find_ranks(*self._rank_arguments, self.framework.ranks(), os.environ)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch.

        Raises:
            ConfigError: This is a worker process of torch's DataLoader.
        """
        refuse_torch_worker()
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        self._settle()
        self._loaded = None
        transfer = self._transfer
        if transfer is not None:
            transfer.begin()
        elif self._as_tuple is None:
            yield from self._consumer.epoch()
            return
        for batch in self._consumer.epoch():
            chosen = batch if transfer is None else transfer.receive(batch)
            del batch  # or its memory would be held one step longer
            if self._as_tuple is not None:
                chosen = self._tuple(chosen)
            yield chosen
            del chosen

    def _settle(self) -> None:
        """Look for ranks again until some are found, because trainers may set them late."""
        if self._options.ranks.explicit:
            return
        ranks = self._ranks()
        if not ranks.explicit:
            return
        saved = None if self._loaded is None else self._loaded[0].to_dict(self._options)
        self._consumer.close()
        self._options = replace(self._options, ranks=ranks)
        self._consumer = self._new_consumer()
        if saved is not None and self._loaded is not None:
            self.load_state_dict(saved, self._loaded[1])

    def _tuple(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        assert self._as_tuple is not None
        try:
            return tuple(batch[name] for name in self._as_tuple)
        except KeyError as error:
            raise ConfigError(
                f"as_tuple: {unknown_field(error.args[0], list(batch))}", code="GC601"
            ) from None
        except TypeError:
            raise ConfigError(
                f"as_tuple needs a dict, but batch_transform returned {type(batch).__name__}",
                code="GC601",
            ) from None

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        With ``fixed`` this waits for the whole cache.

        Raises:
            TypeError: Epochs grow, so they have no fixed length.
        """
        share = self.rank_share()
        if share is None:
            raise TypeError(
                "an epoch of a growing cache has no length; set samples_per_epoch, or fixed=True"
            )
        return share.steps

    def rank_share(self) -> RankShare | None:
        """Return this rank's share of an epoch, or None if epochs grow.

        With ``fixed`` this waits for the whole cache.
        """
        options = self.options
        samples = options.samples_per_epoch
        if options.fixed:
            view = wait_for_samples(
                options.root, options.min_samples, complete=True, rank=options.ranks.rank
            )
            samples = view.totals.samples
        return None if samples is None else options.rank_share(samples)

    def rest_share(self) -> RankShare | None:
        """Return this rank's share of the next iteration, which may be the rest of an epoch.

        Returns None if epochs grow.
        """
        whole, loaded = self.rank_share(), self._consumer.loaded
        if whole is None or loaded is None:
            return whole
        rows = epoch_rows_left(loaded, self._options)
        return whole if rows is None else self._options.rank_share(rows)

    @property
    def step(self) -> int:
        """Number of batches that were delivered in the current epoch."""
        return self._consumer.step

    @property
    def global_step(self) -> int:
        """Number of batches delivered in all epochs, including those before a loaded state.

        The last received batch is step ``global_step - 1`` in the journal.
        """
        return self._consumer.global_step

    @property
    def options(self) -> LoaderOptions:
        """The arguments, with the ranks that are known by now."""
        self._settle()
        return self._options

    @property
    def classes(self) -> dict[str, list[str]]:
        """Names of classes by field, for each field of the cache that has classes.

        ``classes[field][i]`` is the name of class ``i``. This waits until the cache knows the
        schema of its samples.
        """
        return cached_classes(self._options.root)

    @property
    def report(self) -> Report:
        """Figures about the deliveries: the latest epoch, reuse, coverage, and the bottleneck."""
        return self._consumer.report

    def metrics(self, prefix: str = "data/") -> dict[str, float]:
        """Return the numbers of the report by name, for TensorBoard, W&B, MLflow and others.

        Nothing is logged. Pass the result to your tracker, with the step's other metrics.

        Args:
            prefix: Prefix of each name. Trackers group names by the part before the slash.

        Returns:
            A dict of name to float, with the known numbers only.
        """
        return self.report.metrics(prefix)

    def state_dict(self) -> dict[str, Any]:
        """Return this loader's position, which is after the last delivered batch.

        The state consists of plain values, for `torch.save` and `json.dumps`. A loader that
        loads it delivers the same batches that this loader would deliver for the rest of its
        pass: the same samples in the same order, with the same random generators for the
        transform. That holds in another process and on another machine, too.

        Between epochs a new snapshot follows, as always. It also follows inside an epoch if
        ``samples_per_epoch`` continues it in another pass. Its order depends on the state and
        on the shards cached by then.

        Uses and the figures of `report` are not part of the state. The journal is synced first,
        so a power cut loses no step before the state.

        Returns:
            A dict of plain values for `load_state_dict`.

        Raises:
            JournalError: The journal cannot be written.
        """
        self._consumer.note_state()
        return self._consumer.position().to_dict(self._options)

    def load_state_dict(
        self, state: Mapping[str, Any], missing: MissingShards = "refetch"
    ) -> None:
        """Continue from the position of another loader.

        The next iteration is the rest of its epoch.

        After the last batch of an epoch the rest is empty, and the iteration after it starts
        the next epoch. The next iteration leases the shards that are still cached.

        Args:
            state: Result of `state_dict`, from a loader with the same batch_size, seed,
                shuffle, drop_last, samples_per_epoch and fixed. The functions must be the same,
                too. If the number of ranks differs, the rest of the pass is divided anew among
                them. Each rank of a machine may load the state of any of its ranks.
            missing: The action if shards for the rest of the pass are no longer cached.
                ``"refetch"``: the service draws them again, and the loader waits for them.
                ``"substitute"``: other shards take their places, as far as the cache has
                others. ``"error"``: raise CacheError.

        Raises:
            ConfigError: ``state`` is not a state, or belongs to other arguments or another
                cache.
            CacheError: Shards are gone. A loss that the next iteration finds is raised there.
        """
        if missing not in MISSING_SHARDS:
            raise ConfigError(
                f"missing must be one of {', '.join(MISSING_SHARDS)}, found {missing!r}",
                code="GC601",
            )
        loaded = Position.from_dict(state, self.options)
        self._consumer.reset(loaded, missing)
        self._loaded = loaded, missing

    def close(self) -> None:
        """End threads and processes, and release the snapshots.

        A later iteration starts them anew.
        """
        self._consumer.close()

    def __repr__(self) -> str:
        size = self._options.batch_size
        return f"{type(self).__name__}({str(self._options.path)!r}, batch_size={size})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_options", "_as_tuple", "_rank_arguments", "_device")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # In another process the rank may differ.
        self._options = replace(self._options, ranks=self._ranks())
        self._loaded = None
        self._transfer = self._transfer_to(self._device)
        self._consumer = self._new_consumer()
