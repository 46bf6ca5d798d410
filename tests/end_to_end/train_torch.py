"""A PyTorch training loop: ``python -m … CACHE EPOCHS UNTIL``; prints JSON.

It goes on until the file UNTIL appears, for EPOCHS epochs at least.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from growcache.torch import EpochLoader
from tests.end_to_end.recordings import SHAPE, wrong


def main(cache: str, epochs: int, until: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SHAPE[0] * SHAPE[1], 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen: set[int] = set()
    sizes: list[int] = []
    bad = 0
    with EpochLoader(cache, batch_size=16, min_samples=32, seed=1, job="torch") as loader:
        while len(sizes) < epochs or not until.exists():
            count = 0
            for batch in loader:
                loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                bad += wrong(batch["number"].numpy(), batch["x"].numpy())
                seen.update(batch["number"].tolist())
                count += len(batch["x"])
            sizes.append(count)
            time.sleep(0.2)  # a step on real data takes time; the cache grows meanwhile
        skipped = loader.report.skipped
    print(json.dumps({"sizes": sizes, "seen": len(seen), "wrong": bad, "skipped": skipped}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
