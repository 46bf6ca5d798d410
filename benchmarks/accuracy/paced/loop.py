"""The program of a run: `python -m benchmarks.accuracy.paced.loop ARM PLACE PLAN RESULT`, or `write ARM SAMPLES FOLDER`.

The clock begins when the loader is opened, with everything imported, and covers the start of workers and services.
A step takes its pace, or longer if it computes longer, which is counted as `late_seconds`. The loop keeps its weights at
regular steps and evaluates them after the run, so evaluation gives no loader time to catch up.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.accuracy.models import sources_model
from benchmarks.accuracy.paced.place import Batch, Place, samples_of
from benchmarks.accuracy.training import LEARNING_RATE


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a run is, and how fast its steps are."""

    steps: int
    seconds: float  # at most
    step_seconds: float
    evaluate_every: int
    test: str


class Step(NamedTuple):
    """A step: when its batch was asked for, how long it took to come, and how many samples were new."""

    asked: float
    waited: float
    samples: int
    new: int


@dataclass
class Record:
    """The record of a run; times are seconds since the loader was opened."""

    began: float
    steps: list[Step] = field(default_factory=list)
    points: list[tuple[int, float, float]] = field(default_factory=list)
    late_seconds: float = 0.0


Weights = dict[str, Tensor]


def run(arm: Any, place: Place, plan: Plan, steps: IO[str]) -> Record:
    """Train until the plan's end, then judge the weights that were kept; steps are written as they are made."""
    torch.set_num_threads(1)
    model = sources_model(place.seed)
    record = Record(time.monotonic())
    print(record.began, file=steps)
    with closing(arm.batches(place)) as batches:
        kept = list(_trained(model, batches, plan, record, steps))
    windows, labels = samples_of(Path(plan.test))
    test = Batch(model[0](torch.from_numpy(windows)), torch.from_numpy(labels))
    for step, at, weights in kept:
        model.load_state_dict(weights)
        record.points.append((step, at, _accuracy(model[1:], test)))
    return record


def _trained(
    model: nn.Sequential, batches: Iterator[Batch], plan: Plan, record: Record, steps: IO[str]
) -> Iterator[tuple[int, float, Weights]]:
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    seen: set[int] = set()
    for step in range(1, plan.steps + 1):
        asked = time.monotonic()
        batch = next(batches)
        came = time.monotonic()
        sums = {zlib.crc32(window) for window in batch.inputs.numpy()}
        made = Step(asked - record.began, came - asked, len(batch.labels), len(sums - seen))
        record.steps.append(made)
        print(*made, file=steps)
        seen |= sums
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rest = plan.step_seconds - (time.monotonic() - came)
        record.late_seconds += max(0.0, -rest)
        time.sleep(max(0.0, rest))
        now = time.monotonic() - record.began
        over = now >= plan.seconds or step == plan.steps
        if step % plan.evaluate_every == 0 or over:
            yield step, now, {k: v.clone() for k, v in model.state_dict().items()}
        if over:
            return


@torch.no_grad()
def _accuracy(head: nn.Module, test: Batch) -> float:
    return 100 * float((head(test.inputs).argmax(1) == test.labels).double().mean())


def main() -> None:
    do, name, *given = sys.argv[1:]
    arm = importlib.import_module(f"benchmarks.accuracy.paced.{name}")
    if do == "write":
        windows, labels = samples_of(Path(given[0]))
        arm.write(windows, labels, Path(given[1]))
        return
    place, plan, result = Place.from_json(given[0]), Plan(**json.loads(given[1])), given[2]
    with Path(result).with_suffix(".steps").open("w", buffering=1, encoding="utf-8") as steps:
        record = run(arm, place, plan, steps)
    partial = Path(result).with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
    partial.rename(result)


if __name__ == "__main__":
    main()
