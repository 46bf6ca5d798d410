"""Lightning, Accelerate and Transformers train on an `EpochDataLoader`, alone and as two ranks.

They are run as jobs of their own: they warn when they are imported, which the suite forbids.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.filled import Filled
from tests.loading.conftest import full_of
from tests.train_with import BATCH, EPOCH_SAMPLES, EPOCHS, SAVED_STEP

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROGRAM = Path(__file__).with_name("train_with.py")
TRAINERS = ("lightning", "accelerate", "transformers")
STATEFUL = ("lightning", "accelerate", "torchdata")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Filled]:
    with Filled(tmp_path / "cache", full_of((4,))) as filled:
        filled.add(*range(10))
        filled.complete()
        yield filled


def train(trainer: str, cache: Filled, out: Path, *more: str, ranks: int = 1) -> list[Any]:
    """Run a job; return what each of its ranks was given."""
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"needs {trainer}")
    out.mkdir(exist_ok=True)
    launcher: list[str] = []
    if trainer == "lightning":  # starts its ranks itself
        more = (str(ranks), *more)
    elif ranks > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        launcher += [f"--master-port={free_port()}"]
    done = subprocess.run(
        [sys.executable, *launcher, PROGRAM, trainer, cache.root, out, *more],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parent.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def flat(steps: list[list[int]]) -> list[int]:
    return [name for step in steps for name in step]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_epochs_of_a_trainer(trainer: str, cache: Filled, tmp_path: Path) -> None:
    (found,) = train(trainer, cache, tmp_path / "out")
    steps = EPOCH_SAMPLES // BATCH
    assert (len(found["steps"]), found["length"]) == (EPOCHS * steps, steps)
    assert found["same"]  # it trained on this very loader
    assert found["samples"] == EPOCH_SAMPLES
    one_pass = flat(found["steps"])[:100]
    assert len(set(one_pass)) == 100  # two epochs and a half: each sample once
    if trainer == "accelerate":
        assert found["again"] == found["steps"][steps + SAVED_STEP : 2 * steps]
    if trainer == "lightning":
        assert len(set(flat(found["predicted"]))) == 100
        (saved,) = (tmp_path / "out").glob("*step=13.ckpt")
        (again,) = train(trainer, cache, tmp_path / "again", str(saved))
        assert flat(again["steps"])[: 100 - 13 * BATCH] == one_pass[13 * BATCH :]
        assert len(again["steps"]) == len(found["steps"]) - 13


def test_lightning_overfits_on_the_same_batches_of_a_fixed_loader(
    cache: Filled, tmp_path: Path
) -> None:
    (found,) = train("lightning", cache, tmp_path / "out", "", "2")
    assert (len(found["steps"]), found["length"]) == (2 * EPOCHS, 2)
    assert found["steps"] == EPOCHS * found["steps"][:2]
    assert len(set(flat(found["steps"]))) == 2 * BATCH


@pytest.mark.parametrize("trainer", TRAINERS)
def test_two_ranks_of_a_trainer(trainer: str, cache: Filled, tmp_path: Path) -> None:
    """Each gets its half of every step: not the same, and not half of its half."""
    found = train(trainer, cache, tmp_path / "out", ranks=2)
    steps = EPOCH_SAMPLES // (2 * BATCH)
    assert [len(one["steps"]) for one in found] == [EPOCHS * steps] * 2
    assert [one["length"] for one in found] == [steps] * 2
    pairs = zip(*(one["steps"] for one in found), strict=True)
    together = [name for pair in pairs for step in pair for name in step]
    assert {len(step) for one in found for step in one["steps"]} == {BATCH}
    assert len(set(together[:96])) == 96  # of a pass of 100


def in_turn(ranks: list[Any]) -> list[int]:
    """The samples of all ranks, step after step."""
    steps = zip(*(one["steps"] for one in ranks), strict=True)
    return [name for step in steps for each in step for name in each]


@pytest.mark.parametrize("trainer", STATEFUL)
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 3)])
def test_a_checkpoint_goes_on_with_other_ranks(
    trainer: str, first: int, second: int, cache: Filled, tmp_path: Path
) -> None:
    """The epoch keeps its count of steps, and no sample of the pass is lost or comes twice."""
    before = train(trainer, cache, tmp_path / "out", ranks=first)
    checkpoint = tmp_path / "out"
    made = len(before[0]["steps"])
    if trainer == "lightning":
        (checkpoint,) = (tmp_path / "out").glob("*step=13.ckpt")
        made, epoch = 13, 13 // (10 // first)
    else:
        epoch = 1
        made = 10 // first + SAVED_STEP
    after = train(trainer, cache, tmp_path / "again", str(checkpoint), ranks=second)
    done = made - epoch * (10 // first)
    length = 10 // second
    epochs = EPOCHS - epoch if trainer == "lightning" else 1
    assert [len(one["steps"]) for one in after] == [
        max(0, length - done) + (epochs - 1) * length
    ] * second
    delivered = in_turn(before)[: made * first * BATCH] + in_turn(after)
    for start in range(0, len(delivered), 100):
        one_pass = delivered[start : start + 100]
        assert len(set(one_pass)) == len(one_pass)
    assert all(
        "expected num_workers=0" in one.get("refused", "expected num_workers=0")
        for one in after
    )
