"""No loader works in a worker process of torch's `DataLoader`: each would deliver everything."""

from __future__ import annotations

import sys

from growcache.errors import ConfigError


def refuse_worker() -> None:
    """Do nothing, unless this is a worker process of torch's `DataLoader`.

    Asked without an import: who is a worker has the module.

    Raises:
        ConfigError: it is.
    """
    module = sys.modules.get("torch.utils.data")
    worker = None if module is None else module.get_worker_info()
    if worker is not None:
        raise ConfigError(
            f"a DataLoader with num_workers={worker.num_workers} iterates over a growcache loader "
            "in its worker processes, each of which would deliver every sample; expected "
            "num_workers=0: growcache makes batches beside the loop by itself. For trainers "
            "that ask for a DataLoader (Lightning, Accelerate, Hugging Face), use "
            "growcache.torch.EpochDataLoader; processes for a transform are the num_workers of the "
            "growcache loader"
        )
