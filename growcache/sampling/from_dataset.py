"""The constructor `from_dataset` of the loaders for PyTorch and NumPy."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self


def _end(service: ExitStack, owner: int) -> None:
    if os.getpid() == owner:  # a forked child, as of a DataLoader, must not end it
        service.close()


class FromDataset:
    """Gives a loader the constructor `from_dataset`."""

    _ends_service: Callable[[], object] | None = None

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        path: str | os.PathLike[str],
        *,
        max_bytes: str | int | None = None,
        workers: int | None = None,
        names: Sequence[str] | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Return a loader over a cache that samplers fill from a map-style Dataset.

        The samplers are separate processes. They call ``dataset[i]`` in threads, for indices in
        random order, until the loader is closed. So ``dataset[i]`` must allow calls from
        several threads; otherwise set ``concurrency: 1``. It should return the same sample at
        every call: random augmentation belongs in the loader's ``transform``. If a service of
        the same dataset already runs on the cache, for example because another rank started it,
        it is joined.

        Args:
            dataset: An object with ``len(dataset)`` and ``dataset[i]``, such as a Dataset of
                torch or a sequence. Or a function or class that makes one without arguments:
                itself, as a `functools.partial`, or as ``"package.module:function"``. A
                function of a module is best, because nothing is pickled, and its source and
                arguments are part of the cache's fingerprint.
            path: Path of the cache directory.
            max_bytes: Bound of the cache, such as ``"200GB"``. None takes the default of
                ``cache.max_bytes``.
            workers: Number of sampler processes. None takes the default of
                ``sampling.workers``.
            names: Names for the items of a tuple, which are ``0``, ``1``, … by default. For a
                dict, the keys to keep.
            name: Name of the dataset in the cache's fingerprint. For an instance the default is
                its class and length, so give a name if other files make another dataset.
            config: Further settings of the service by section, such as ``{"sampling": {"seed":
                1, "concurrency": 4}, "split": {…}}``.
            options: Arguments of the loader; see ``help(EpochLoader)``.

        Returns:
            The loader. Closing it also stops the service that this call started.

        Raises:
            ConfigError: ``dataset`` is not a map-style Dataset or cannot be sent to samplers,
                or a setting is not valid.

        Example::

            dataset = torchvision.datasets.CIFAR10("/data/cifar10")
            loader = EpochLoader.from_dataset(
                dataset, "/data/cache", names=["image", "label"], batch_size=64
            )
        """
        from growcache.sampling.dataset_service import given_dataset, settings_of, start_service

        # First, because a service must not start for arguments that are not valid.
        loader = cls(path, **options)  # type: ignore[call-arg]
        given = given_dataset(dataset, name)
        values = settings_of(given, path, max_bytes, workers, names, config or {})
        service = start_service(given, values)
        # Also at the end of the program, and when the loader is garbage-collected.
        loader._ends_service = weakref.finalize(loader, _end, service, os.getpid())
        return loader

    def close(self) -> None:
        """End threads and processes, and release the snapshots.

        A later iteration starts them anew.

        The service that `from_dataset` started ends as well.
        """
        super().close()  # type: ignore[misc]
        if self._ends_service is not None:
            self._ends_service()
