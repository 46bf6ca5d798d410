"""The callback for Lightning, imported at the first use of `LightningMetrics`.

Lightning is one project under two names, and a trainer of either calls only callbacks of its
own class. The callback therefore derives from the class of each imported package, or else of
the first installed one.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from growcache.errors import ConfigError, MissingLibraryError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[type, ...]:
    found = [name for name in PACKAGES if name in sys.modules]
    found = found or [name for name in PACKAGES if find_spec(name.partition(".")[0])][:1]
    if not found:
        raise MissingLibraryError("LightningMetrics needs Lightning: pip install lightning")
    return tuple(import_module(name).Callback for name in found)


class LightningMetrics(*_bases()):  # type: ignore[misc]
    """A Lightning callback that logs `loader.metrics` at the end of each epoch.

    ``Trainer(callbacks=[LightningMetrics()])`` is enough if the training data is an
    `EpochDataLoader`. With several ranks only the first one logs, as usual with Lightning, and
    it logs its own figures.
    """

    def __init__(
        self, loader: Any = None, *, every_n_steps: int | None = None, prefix: str = "data/"
    ) -> None:
        """Check the arguments.

        Args:
            loader: A loader with the method ``metrics``. None takes the trainer's training
                loader.
            every_n_steps: Log within epochs, too, each time after this number of batches. None
                logs at the end of epochs only.
            prefix: Prefix of each logged name.

        Raises:
            ConfigError: ``every_n_steps`` is less than 1.
        """
        super().__init__()
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(
                f"every_n_steps: expected at least 1, found {every_n_steps}", code="GC601"
            )
        self._loader = loader
        self._every_n_steps = every_n_steps
        self._prefix = prefix

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log if ``every_n_steps`` batches are done."""
        if self._every_n_steps is not None and (batch_idx + 1) % self._every_n_steps == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log at the end of the epoch."""
        self._log(trainer)

    def _log(self, trainer: Any) -> None:
        loader = trainer.train_dataloader if self._loader is None else self._loader
        if not hasattr(loader, "metrics"):
            raise ConfigError(
                "LightningMetrics expected a loader of growcache as the training data, found "
                f"{type(loader).__name__}; name it: LightningMetrics(loader)",
                code="GC601",
            )
        metrics = loader.metrics(self._prefix)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)


# The public module, as users see it in pickles, tracebacks and help().
LightningMetrics.__module__ = "growcache.torch"
