"""Walk through the documentation as a newcomer, and print how long each step took: ``make walk``.

The steps follow README.md and the pages that it names, in a fresh clone and a fresh virtual environment: the demo, then
recordings in S3 with a table of labels, cut into windows and split by subject, in PyTorch, in Keras and as a Slurm job. This
program starts the S3 server. A step whose requirements are missing is skipped, and the table says so.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np

from benchmarks.measure import machine
from benchmarks.servers import KEY, SECRET, Server, make_bucket, running_server
from tests.deploy.slurm import Cluster, can_run, cluster

ROOT = Path(__file__).parent.parent
BUCKET = "my-bucket"
SUBJECTS, ROWS, CHANNELS, RATE = 20, 64_000, 4, 256.0
STATES = {"rest": 10.0, "task": 22.0}  # each with the frequency of its oscillation in Hz
WINDOW = 1024
JOB_SECONDS = 300.0

INSTALL, TRY = "clone and install", "the demo"
DESCRIBE = "describe the data: labels, windows, split; plan"
TORCH = "fill the caches and train in PyTorch"
KERAS = "install TensorFlow and train in Keras"
SLURM = "train as a Slurm job on two nodes"

# docs/guides/epochs.md, "Validation". `init` finds the table of labels itself.
SPLIT = "split: {group: {label: subject}, fractions: {train: 0.8, val: 0.2}, use: train}\n"
VALIDATION = (
    "split.use=val",
    "cache.path=validation",
    "cache.max_samples=500",
    "cache.eviction=none",
)

TORCH_PROGRAM = """
import torch
from torch import nn

from growcache.torch import EpochLoader

train = EpochLoader("cache", batch_size=64, min_samples=1000)
validation = EpochLoader("validation", batch_size=64, fixed=True)
model = nn.Sequential(
    nn.Conv1d(4, 16, 33, stride=4), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(),
    nn.Linear(16, len(train.classes["state"])),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(10):
    for batch in train:
        loss = nn.functional.cross_entropy(model(batch["x"].transpose(1, 2)), batch["state"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(train.report)
with torch.no_grad():
    hits = [
        (model(batch["x"].transpose(1, 2)).argmax(1) == batch["state"]).float()
        for batch in validation
    ]
print("held out: %.3f" % torch.cat(hits).mean().item())
"""

KERAS_PROGRAM = """
import keras

import growcache.tensorflow as gtf

train = gtf.dataset("cache", batch_size=64, as_tuple=("x", "state"), endless=True)
validation = gtf.dataset("validation", batch_size=64, as_tuple=("x", "state"), fixed=True)
model = keras.Sequential([
    keras.layers.Input((1024, 4)),
    keras.layers.Conv1D(16, 33, strides=4, activation="relu"),
    keras.layers.GlobalMaxPooling1D(),
    keras.layers.Dense(len(train.classes["state"])),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
model.fit(train, steps_per_epoch=40, epochs=10, shuffle=False, verbose=2)
print("held out: %.3f" % model.evaluate(validation, verbose=0)[1])
"""


class Failed(Exception):
    """A step did not do what its page says."""


@dataclass
class Walk:
    """A newcomer's folder, and what the steps took.

    Attributes:
        folder: of the clone, the virtual environment and the caches.
        server: has the bucket.
        seconds: by step; None where a step was skipped.
    """

    folder: Path
    server: Server
    seconds: dict[str, float | None] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)

    @property
    def clone(self) -> Path:
        """The newcomer's clone of the repository."""
        return self.folder / "growcache"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the newcomer's shell: an active virtual environment, and credentials."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("HOME", "LANG", "TMPDIR") or name.startswith("PIP_")
        }
        return kept | {
            "PATH": f"{self.folder}/venv/bin:{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(self.clone / "constraints.txt"),
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.server.endpoint,
        }

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """Run a command in the newcomer's folder; return what it printed.

        Raises:
            Failed: it ended with an error, which is shown.
        """
        done = subprocess.run(
            words, cwd=cwd or self.folder, env=self.environment, text=True, capture_output=True
        )
        if done.returncode:
            raise Failed(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout

    @contextmanager
    def service(self, *overrides: str) -> Iterator[None]:
        """Run `growcache run growcache.yaml` in another terminal during the block."""
        settings = [word for one in overrides for word in ("--set", one)]
        process = subprocess.Popen(
            ["growcache", "run", "growcache.yaml", *settings],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Measure a step."""
        print(f"{step} …", flush=True)
        began = time.monotonic()
        yield
        self.seconds[step] = time.monotonic() - began
        print(f"  {self.seconds[step]:.1f} s", flush=True)

    def skip(self, step: str, why: str) -> None:
        """Leave out a step, with the reason in the table."""
        self.seconds[step], self.found[step] = None, f"skipped: {why}"


def fill_bucket(server: Server) -> None:
    """Write recordings of each subject in each state, and the table that names the states."""
    make_bucket(server, BUCKET)
    store, rng = server.writing(BUCKET), np.random.default_rng(0)
    seconds = np.arange(ROWS, dtype=np.float32)[:, None] / RATE
    lines = ["path,subject,state"]
    for subject in range(SUBJECTS):
        for run, (state, hertz) in enumerate(STATES.items(), 1):
            phases = rng.uniform(0, 2 * np.pi, CHANNELS)
            wave = np.sin(2 * np.pi * hertz * seconds + phases) + rng.normal(
                0, 2, (ROWS, CHANNELS)
            )
            key = f"sub-{subject:02d}/run-{run}.npy"
            np.save(data := BytesIO(), wave.astype(np.float32))
            store.put(f"recordings/{key}", data.getvalue())
            lines.append(f"{key},sub-{subject:02d},{state}")
    store.put("recordings.csv", "\n".join(lines).encode())


def install(walk: Walk) -> None:
    """README, "Train on your own data"."""
    subprocess.run(
        ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", ROOT, walk.clone],
        check=True,
    )
    subprocess.run([sys.executable, "-m", "venv", walk.folder / "venv"], check=True)
    walk.run("pip", "install", "--quiet", ".[s3,torch]", cwd=walk.clone)


def try_demo(walk: Walk) -> None:
    """docs/start/index.md, "See it work"."""
    printed = " ".join(walk.run("growcache", "demo").split())
    accuracies = re.search(r"Held-out accuracy went from (.*?) while", printed)
    if accuracies is None:
        raise Failed(f"the demo reported no accuracy: {printed[-2000:]}")
    walk.found[TRY] = f"held out: {accuracies[1]}"


def describe(walk: Walk) -> None:
    """README step 1; docs/guides/epochs.md, "Validation"."""
    url = f"s3://{BUCKET}/recordings/**/*.npy"
    walk.run("growcache", "init", "growcache.yaml", "--yes", "--url", url)
    config = walk.folder / "growcache.yaml"
    text = config.read_text(encoding="utf-8")
    text = _replaced(text, r"^  options: .*\n", f"  options: {{window: {WINDOW}}}\n")
    text = _replaced(text, r"^split: null\n", SPLIT)
    if "s3://my-bucket/recordings.csv" not in text:
        raise Failed(f"`init` did not find the table of labels:\n{text}")
    config.write_text(text, encoding="utf-8")
    walk.run("growcache", "plan", "growcache.yaml", "--consume", "400")


def _replaced(config: str, line: str, new: str) -> str:
    text, count = re.subn(line, new, config, flags=re.MULTILINE)
    if count != 1:
        raise Failed(f"the config of `init` has {count} lines like {line!r}:\n{config}")
    return text


def train(walk: Walk, step: str, program: str) -> None:
    """README step 3; docs/guides/tensorflow.md."""
    path = walk.folder / "train.py"
    path.write_text(program, encoding="utf-8")
    found = walk.run("python", str(path)).strip().splitlines()[-1]
    walk.found[step] = found
    if float(found.removeprefix("held out: ")) < 0.9:
        raise Failed(f"{step}: {found}, and should be above 0.9")


def submit(walk: Walk, slurm: Cluster) -> None:
    """docs/deploy/index.md, "Slurm"."""
    job = slurm.run(
        *("sbatch", "--parsable", "--nodes=2", f"--chdir={walk.clone}"),
        *(f"--output={walk.folder}/job.log", "deploy/slurm/train.sbatch", "--steps=500"),
        **walk.environment,
        CONFIG=str(walk.folder / "growcache.yaml"),
        CHECKPOINT=str(walk.folder / "last.pt"),
        SCRATCH=str(slurm.scratch),
    )
    log, deadline = walk.folder / "job.log", time.monotonic() + JOB_SECONDS
    while slurm.state(job) not in ("COMPLETED", ""):
        if time.monotonic() > deadline or slurm.state(job) == "FAILED":
            raise Failed(
                f"the job did not end well:\n{log.read_text(encoding='utf-8')[-4000:]}"
            )
        time.sleep(0.5)
    ends = [
        line for line in log.read_text(encoding="utf-8").splitlines() if "ends at step" in line
    ]
    walk.found[SLURM] = ends[-1].strip()


def walk_all(walk: Walk) -> None:
    with walk.timed(INSTALL):
        install(walk)
    with walk.timed(TRY):
        try_demo(walk)
    fill_bucket(walk.server)
    with walk.timed(DESCRIBE):
        describe(walk)
    with walk.service(), walk.service(*VALIDATION):
        with walk.timed(TORCH):
            train(walk, TORCH, TORCH_PROGRAM)
        with walk.timed(KERAS):
            walk.run("pip", "install", "--quiet", ".[tensorflow]", cwd=walk.clone)
            train(walk, KERAS, KERAS_PROGRAM)
    if not can_run():
        walk.skip(SLURM, "needs root, Slurm and munge")
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        slurm = stack.enter_context(cluster(folder))
        with walk.timed(SLURM):
            submit(walk, slurm)


def table(walk: Walk) -> str:
    """Return the steps as a table in Markdown."""
    rows = [
        f"| {step} | {'' if seconds is None else f'{seconds:.0f}'} | {walk.found.get(step, '')} |"
        for step, seconds in walk.seconds.items()
    ]
    about = machine()
    total = sum(seconds for seconds in walk.seconds.values() if seconds is not None)
    return "\n".join(
        (
            f"{total / 60:.1f} minutes on {about['cores']} cores of {about['cpu']}, by commands alone.",
            "",
            "| step | seconds | result |",
            "| --- | --: | --- |",
            *rows,
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make walk", description=__doc__)
    parser.add_argument("--server", default="auto", help="juicefs, moto or auto")
    parser.add_argument("--keep", type=Path, help="a folder for the walk that stays")
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = given.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="newcomer-"))
        )
        folder.mkdir(exist_ok=True)
        walk = Walk(folder, stack.enter_context(running_server(given.server)))
        try:
            walk_all(walk)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
        print(table(walk))
    return 0


if __name__ == "__main__":
    sys.exit(main())
