"""What the pages of docs/ say is true: their code runs, and their tables are computed."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import itertools
import math
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

from growcache.cache import incoming
from growcache.cache.eviction_policy import RETIRED_SHARE, Candidate, choose_evictions
from growcache.cache.formats import CACHE_FORMATS
from growcache.cache.formats.encoding import MAX_PAYLOAD_BYTES
from growcache.cache.space import fixed_budget, minimum_bytes
from growcache.cli.cli import app, main
from growcache.config import CacheConfig
from growcache.config_text import load_config
from growcache.errors import ConfigError
from growcache.formats import FORMATS, open_format, open_source
from growcache.formats.base import Measure, Visit
from growcache.formats.contiguous import ArrayLayout, read_samples
from growcache.formats.grids import ArrayGrid, AxisGrid
from growcache.loading.plan import window_samples
from growcache.loading.report import WAIT_SHARE, Report
from growcache.loading.report_table import WARN_REUSE
from growcache.numpy import EpochLoader
from growcache.sampling import sampler_pool
from growcache.sampling.label_table import parse_table
from growcache.sampling.labels import Labels
from growcache.sampling.sizing import RAMP_DOUBLINGS, MeasuredSource, measure_sizing
from growcache.schema import Sample, Schema
from growcache.store.contract import Entry
from tests.filled import Filled
from tests.planned import plan_pass
from tests.ragged import ragged_cache
from tests.sampling.services import run, status
from tests.tables import DOCS

ROOT = Path(__file__).parent.parent
PATHS = {
    "start": "start/index.md",
    "faq": "faq.md",
    "epochs": "guides/epochs.md",
    "resuming": "guides/resuming.md",
    "gpus": "guides/gpus.md",
    "augmentation": "guides/augmentation.md",
    "choosing": "guides/choosing.md",
    "own_code": "guides/own_code.md",
    "formats": "reference/formats.md",
    "joining": "guides/joining.md",
    "randomness": "concepts/randomness.md",
    "tensorflow": "guides/tensorflow.md",
    "not_offered": "beside_others/not_offered.md",
    "datasets": "guides/datasets.md",
    "distributed": "deploy/distributed.md",
}
NAMES = sorted(PATHS)
PAGES = {name: (DOCS / path).read_text(encoding="utf-8") for name, path in PATHS.items()}
GB, MB, KIB = 10**9, 10**6, 1024


def blocks(page: str, language: str) -> list[str]:
    """Blocks of a page, also those of numbered lists."""
    found = re.findall(rf"^ *```{language}\n.*?^ *```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block).split("\n", 1)[1].removesuffix("```") for block in found]


def rows_below(page: str, mark: str) -> list[list[str]]:
    """The cells of the table that follows a text, without its heading."""
    _, found, rest = PAGES[page].partition(mark)
    assert found, mark
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), rest.splitlines())
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def computed(page: str, name: str) -> list[list[str]]:
    return rows_below(page, f"<!-- computed: {name} -->")


def labelled(name: int) -> Sample:
    x = np.random.default_rng(name).random(16).astype("<f4")
    return {"x": x, "y": x.mean()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the caches that the pages name; the current one."""
    monkeypatch.chdir(tmp_path)
    with (
        Filled(tmp_path / "cache", labelled) as cache,
        Filled(tmp_path / "validation", labelled, eviction="none") as validation,
        ragged_cache(tmp_path / "ragged", {"x": ["float32", None, 4]}) as ragged,
    ):
        cache.add(*range(20), samples=64)
        cache.population(1280)
        validation.add(*range(3), samples=100)
        ragged.add(0, 1, samples=20)
        for filled in (cache, validation, ragged):
            filled.complete()
        yield tmp_path


def run_blocks(page: str, *flags: str) -> None:
    """Run the Python of a page as one program, as it stands."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", "\n".join(blocks(page, "python"))],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


# ------------------------------------------------------------------------ blocks


def test_every_block_is_of_a_kind_that_is_run() -> None:
    for page, text in PAGES.items():
        fences = re.findall(r"^ *```([\w{}]*)$", text, re.MULTILINE)
        assert set(fences[::2]) <= {"csv", "python", "yaml", "sh", "{toctree}"}, page
        assert set(fences[1::2]) <= {""}, page


@pytest.mark.torch
@pytest.mark.parametrize(
    "page",
    [
        *(
            pytest.param(page, marks=pytest.mark.slow)
            for page in ("epochs", "resuming", "gpus", "augmentation")
        ),
        "not_offered",
        "start",
    ],
)
def test_the_code_for_pytorch_runs(home: Path, page: str) -> None:
    pytest.importorskip("torch")
    if page == "epochs":
        pytest.importorskip("tensorboard")
    run_blocks(page, "-W", "error", "-W", "ignore:distutils")
    if page == "epochs":
        assert scalars(home / "runs" / "first")["data/reuse"] == 2.0


def scalars(folder: Path) -> dict[str, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: found.Scalars(name)[-1].value for name in found.Tags()["scalars"]}


@pytest.mark.slow
@pytest.mark.torch
def test_the_code_of_a_dataset_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks("datasets", "python")))
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_the_code_of_several_machines_runs(home: Path, tmp_path: Path) -> None:
    """With the command of the page, as two nodes of a rank each on this machine."""
    pytest.importorskip("torch")
    (command,) = re.findall(r"`torchrun ([^`]*)`", PAGES["distributed"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        changes = {"--nnodes 3": "--nnodes 2", "node0": "127.0.0.1", "node 8": "node 1"}
        changes["29500"] = str(free.getsockname()[1])
    for before, after in changes.items():
        command = command.replace(before, after)
    second = tmp_path / "second"
    second.mkdir()
    with Filled(second / "cache", labelled) as cache, ExitStack() as stack:
        cache.add(*range(7), samples=64)
        nodes = []
        for number, folder in enumerate((home, second)):
            (folder / "train.py").write_text("\n".join(blocks("distributed", "python")))
            words = command.replace("--node-rank 0", f"--node-rank {number}").split()
            process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            nodes.append(process)
        assert [process.wait(300) for process in nodes] == [0, 0]


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_code_for_tensorflow_runs(home: Path) -> None:
    pytest.importorskip("tensorflow")
    (export,) = blocks("tensorflow", "sh")
    assert main(export.split()[1:]) == 0
    run_blocks("tensorflow")


@pytest.mark.parametrize("page", NAMES)
def test_the_configs_load(page: str, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        (tmp_path / "growcache.yaml").write_text(block)
        config = load_config(tmp_path / "growcache.yaml")
        for source in config.sources:
            open_source(source)


@pytest.mark.parametrize("page", NAMES)
def test_the_commands_exist(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines = [line for line in lines if not line.startswith(("pip ", "python3 "))]
    lines += re.findall(r"`(growcache [a-z][^`]*)`", PAGES[page])
    for line in lines:
        _, command, *arguments = line.split()
        assert command in commands, line
        main([command, "--help"])
        shown = capsys.readouterr().out
        for option in (word for word in arguments if word.startswith("--")):
            assert option in shown, line
            if option == "--set":
                load_config({"source": {"url": "x"}}, [arguments[arguments.index(option) + 1]])


def test_every_setting_that_is_named_exists() -> None:
    config = load_config({"source": {"url": "x"}})
    for page, text in PAGES.items():
        for section, key in re.findall(r"`(source|sampling|cache)\.(\w+)", text):
            if not key.isdigit():  # one of several sources
                assert hasattr(getattr(config, section), key), f"{page}: {section}.{key}"


# ----------------------------------------------------------------------- formats


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_option_of_a_format_is_explained(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_format(name, {"?": 0})
    options = str(caught.value).rpartition("known are ")[2].split(", ")
    _, found, section = PAGES["formats"].partition(f"\n## {name}\n")
    assert found
    section = section.partition("\n## ")[0]
    assert [option for option in options if not re.search(rf"\b{option}\b", section)] == []
    assert f"[{name}](#{name})" in PAGES["formats"]


# ----------------------------------------------------------------------- joining


def test_the_table_belongs_to_the_objects(tmp_path: Path) -> None:
    table = blocks("joining", "csv")
    (tmp_path / "c.yaml").write_text(blocks("joining", "yaml")[0])
    source = load_config(tmp_path / "c.yaml").sources[0]
    assert source.labels is not None
    parsed = parse_table(table[0].encode(), "csv", "path", source.labels.columns)
    key = "recordings/sub-01/run-2.npy"
    assert Labels([source], [parsed]).joined([0], [key]) == [{"subject": "sub-01", "state": 1}]
    ways = rows_below("joining", "is looked up in the column")
    for match, _ in ways[1:]:
        name = match.strip("`").strip('"')
        labels = source.labels.model_copy(update={"match": name})
        expected = {"name": "run-2.npy", "stem": "run-2"}.get(name, "sub-01")
        row = parse_table(f"path,state\n{expected},1\n".encode(), "csv", "path", ["state"])
        matched = Labels([source.model_copy(update={"labels": labels})], [row])
        assert matched.rows([0], [key]).tolist() == [0]


# ------------------------------------------------------------------------ epochs


def test_how_epochs_grow() -> None:
    consumption, ratio, room = 500, Fraction(1, 2), 10_000
    fifth = Fraction(RETIRED_SHARE).limit_denominator(10)
    samples = new = Fraction(1000)
    begins = Fraction(0)
    rows = computed("epochs", "growth")
    for epoch, row in enumerate(rows):
        assert row == [
            str(epoch),
            f"{round(samples):,}",
            f"{round(new):,}",
            f"{round(begins)} s",
        ]
        begins += samples / consumption
        new = min(ratio * samples, room - samples)
        samples = samples + new if samples + new < room else (1 - fifth) * room
    assert len(rows) == 8


def test_where_the_second_window_begins() -> None:
    shard = 244  # 64 MB of samples of 256 KiB
    counts = {
        shards: len(
            plan_pass(
                [(number, shard) for number in range(shards)],
                seed=0,
                pass_number=0,
                target_samples=window_samples(256 * KIB),
            )
        )
        for shards in (6, 8, 40)
    }
    assert counts == {6: 1, 8: 2, 40: 10}


def test_a_loader_without_a_length_says_so(home: Path) -> None:
    with pytest.raises(TypeError):
        len(EpochLoader("cache", batch_size=64))


def test_every_field_of_the_report_is_explained() -> None:
    named = [
        name
        for row in rows_below("epochs", "`loader.report` is a value")
        for name in re.findall(r"`(\w+)`", row[0])
    ]
    assert named == [field.name for field in dataclasses.fields(Report)]
    assert WARN_REUSE == 4
    assert WAIT_SHARE == 0.1


# ---------------------------------------------------------------------- choosing


def test_the_turnover_of_a_cache() -> None:
    cache, dataset, link, consumption = 100 * GB, 5000 * GB, 100 * MB, 500 * MB
    seconds = 12 * 3600
    assert [row[2] for row in computed("choosing", "turnover")] == [
        f"{cache / link:,.0f} s",
        f"{cache / consumption:,.0f} s",
        f"{consumption / link:.1f}",
        f"{cache / (2 * link):,.0f} s",
        f"{100 * cache / dataset:.0f} %",
        f"{link * seconds / 1e12:.1f} TB",
        f"{100 * link * seconds / dataset:.0f} %",
    ]
    assert fixed_budget(100 * GB).total == 20 * MB
    assert fixed_budget(40 * MB).total == 5 * MB


def test_the_worth_of_samples_that_are_alike() -> None:
    for row in computed("choosing", "effective"):
        k = int(row[0])
        worth = [1 / (1 + (k - 1) * rho) for rho in (0.1, 0.5)]
        assert row[1:] == [
            f"{1 / k:.3f}",
            *(f"{one:.2f}" for one in worth),
            *(f"{k * one:.1f}" for one in worth),
        ]


def test_what_so_many_reads_in_flight_can_bring() -> None:
    for sample, reads, latency, k, most in computed("choosing", "requests"):
        workers, concurrency = map(int, reads.split()[::2])
        per_second = workers * concurrency / (int(latency.removesuffix(" ms")) / 1000)
        rate = per_second * int(k) * int(sample.removesuffix(" KiB")) * KIB / MB
        assert most == (f"{rate:.1f} MB/s" if rate < 10 else f"{rate:.0f} MB/s")


class Recorded:
    """An object of zeros that notes what is read of it."""

    def __init__(self, size: int) -> None:
        self.entry = Entry("recording", size, None, None)
        self.source = load_config({"source": {"url": "x"}}).sources[0]
        self.reads: list[int] = []

    async def read(self, start: int = 0, stop: int | None = None) -> bytes:
        assert stop is not None
        self.reads.append(stop - start)
        return bytes(stop - start)

    async def find(self, key: str) -> Recorded:
        raise AssertionError(key)


def test_read_amplification() -> None:
    array = ArrayLayout(0, (400_000, 64), np.dtype("<i2"))
    for window, stride, k, channels, fetched, requests in computed("choosing", "amplification"):
        chosen = () if channels == "all" else ((1, tuple(range(int(channels)))),)
        grid = ArrayGrid(((0, AxisGrid(int(window), int(stride))),), select=chosen)
        parts = math.ceil(len(grid.on(array.shape, "")) / int(k))
        reader = Recorded(array.nbytes)
        found = asyncio.run(read_samples(reader, {"x": array}, grid, Visit(1, parts, 0, 0)))
        assert len(found) == int(k)
        cached = sum(sample["x"].nbytes for sample, _, _ in found)
        assert fetched == f"{sum(reader.reads) / cached:.2f}"
        assert requests == f"{len(reader.reads) / len(found):.2f}"


def test_the_sizes_of_shards_and_samplers() -> None:
    schema = Schema.from_sample({"x": np.zeros(64 * KIB, "<f4")})
    for bound, k, shard, shards, memory, least in computed("choosing", "shards"):
        visit = int(k.split()[0])
        values = {
            "source": {"url": "x"},
            "sampling": {"samples_per_object": visit},
            "cache": {"max_bytes": bound},
        }
        measure = Measure(256 * KIB, 0, 1000)
        sizing = measure_sizing(
            load_config(values), [MeasuredSource(measure, 1.0, ranged=True)], schema
        )
        nbytes = sizing.shard_samples * schema.nbytes
        group = nbytes * sizing.group_shards
        assert shards == str(sizing.group_shards)
        assert [shard, memory, least] == [
            f"{value / MB:,.0f} MB"
            for value in (nbytes, sampler_pool.PERMITS_EACH * group, minimum_bytes(2, group))
        ]
    assert 2**RAMP_DOUBLINGS == 32
    assert f"{math.ceil(100 * GB / (64 * MB)):,} files" in PAGES["choosing"]


@pytest.mark.parametrize(("cache_format", "files"), [("tfrecord", 1), ("npy", 2)])
def test_a_loader_holds_a_map_per_file_and_no_descriptor(
    tmp_path: Path, cache_format: str, files: int
) -> None:
    with Filled(tmp_path / "cache", labelled, cache_format=cache_format) as cache:
        cache.add(*range(8))
        with EpochLoader(cache.root, batch_size=8, min_samples=1) as loader:
            assert sum(1 for _ in loader) == 10
            next(iter(loader))
            assert len(in_proc(cache.root / "shards", "map_files")) == 8 * files
            assert in_proc(cache.root / "shards", "fd") == []
        assert in_proc(cache.root / "shards", "map_files") == []


def in_proc(folder: Path, kind: str) -> list[str]:
    """The files in a folder that this process has mapped, or open."""
    found = []
    for link in Path("/proc/self", kind).iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:  # that of the listing itself
            continue
    return [path for path in found if path.startswith(str(folder.resolve()))]


def test_what_eviction_does_to_the_uses() -> None:
    rows = {row[0].strip("`"): row[2] for row in computed("choosing", "eviction")}
    assert rows == {
        policy: "" if policy == "none" else f"{100 * effective_share(policy):.0f} %"
        for policy in rows
    }
    assert set(rows) == {"fifo", "random", "most_used", "none"}


def effective_share(policy: str, shards: int = 64, new: int = 8, epochs: int = 2000) -> float:
    """(Σu)²/mΣu² of the shards that left a cache that is read once per epoch."""
    uses: dict[int, int] = {}
    gone: list[int] = []
    for epoch in range(epochs):
        seen = [Candidate(n, n, 1, u, u, leased=False) for n, u in uses.items()]
        gone += [
            uses.pop(n)
            for n in choose_evictions(
                policy, seen, len(uses) + new - shards, 1, seed=epoch
            ).evict
        ]
        uses |= dict.fromkeys(range(epoch * new, (epoch + 1) * new), 0)
        uses = {number: count + 1 for number, count in uses.items()}
    u = np.array(gone[len(gone) // 10 :], np.float64)  # without those of the beginning
    return float(u.sum() ** 2 / (len(u) * (u**2).sum()))


def test_what_the_page_says_of_direct_writes_and_of_formats() -> None:
    assert incoming.PAGE_CACHE_SHARE == 0.5
    assert incoming.LEAST_DIRECT_BYTES == 1 << 20
    assert MAX_PAYLOAD_BYTES == 2**31 - 1
    assert sorted(CACHE_FORMATS) == ["npy", "tfrecord"]
    ragged = Schema.declared({"x": ["float32", None], "y": ["float32", None, None]})
    one, several = (
        [name for name in CACHE_FORMATS["npy"].suffixes(ragged) if f"/{field}." in name]
        for field in "xy"
    )
    assert (len(one), len(several)) == (2, 3)
    assert len(CACHE_FORMATS["tfrecord"].suffixes(ragged)) == 2


@pytest.mark.slow
def test_bounds_may_differ_from_run_to_run_and_contents_may_not(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / "data").mkdir(exist_ok=True)
        np.save(tmp_path / f"data/{number:03d}.npy", np.full((64, 64), number, "<f4"))
    config, cache = tmp_path / "growcache.yaml", tmp_path / "cache"
    config.write_text(
        f"source: {{url: '{tmp_path}/data/*.npy'}}\n"
        "sampling: {workers: 1, shard_samples: 8}\n"
        f"cache: {{path: '{cache}', max_bytes: 4MB, min_free: 0}}\n"
    )
    assert run(config, "--until-full")[0] == 0
    assert status(cache).bytes > 3 * MB
    changed = [
        f"--set={text}"
        for text in (
            "cache.max_bytes=3MB",
            "cache.min_uses=0",
            "cache.eviction=random",
            "sampling.workers=2",
            "sampling.concurrency=4",
        )
    ]
    before = status(cache).drawn
    assert run(config, *changed, "--samples", "16")[0] == 0
    assert status(cache).bytes <= 3 * MB
    assert status(cache).drawn > before
    code, errors = run(config, "--set=sampling.shard_samples=9")
    assert code == 2
    assert "sampling.shard_samples" in errors


# -------------------------------------------------------------------- tensorflow


@pytest.mark.slow
@pytest.mark.tensorflow
def test_what_tensorflow_makes_of_growth(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    gtf = importlib.import_module("growcache.tensorflow")
    assert (gtf.SHUFFLE_BYTES, gtf.SHUFFLE_SAMPLES, gtf.CYCLE_SHARDS) == (64 * MB, 16_384, 4)
    with Filled(tmp_path / "cache", labelled) as cache:
        numbers = itertools.count(4)

        class Growth(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
            steps: list[int] = []  # noqa: RUF012
            running = 0

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.running += 1

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.steps.append(self.running)
                self.running = 0
                cache.add(*itertools.islice(numbers, 4))

        cache.add(*range(4))
        dataset = gtf.dataset(cache.root, batch_size=10, min_samples=1, as_tuple=("x", "y"))
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(loss="mse")
        with pytest.warns(UserWarning, match="ran out of data"):
            model.fit(dataset, epochs=4, verbose=0, shuffle=False, callbacks=[Growth()])
        assert Growth.steps[1:] == [5, 5, 5]  # the cache had 8, 12 and 16 batches then
        assert sum(1 for _ in dataset) == 20
        assert sum(1 for _ in dataset.repeat(2)) == 40
        first, second = (next(iter(dataset.take(1)))[0] for _ in range(2))
        assert not np.array_equal(first, second)

        kept = dataset.cache()
        listed = tf.data.TFRecordDataset(
            tf.data.Dataset.list_files(str(cache.root / "shards/*.tfrecord"))
        )
        assert sum(1 for _ in kept) == 20
        cache.add(next(numbers))
        assert sum(1 for _ in kept) == 20
        cache.retire(0)
        cache.poll()
        with pytest.raises(tf.errors.NotFoundError):
            sum(1 for _ in listed)

        Growth.steps.clear()
        equal = gtf.dataset(
            cache.root, batch_size=10, samples_per_epoch=60, min_samples=1, as_tuple=("x", "y")
        )
        model.fit(equal, epochs=3, verbose=0, shuffle=False, callbacks=[Growth()])
        assert Growth.steps == [6, 6, 6]


# -------------------------------------------------------------------- randomness


def test_what_is_said_of_fairness_is_tested() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests/fairness").glob("test_*.py"))
    rows = rows_below("randomness", "<!-- fairness -->")
    assert len(rows) >= 11
    for _, _, shown in rows:
        assert f"\ndef {shown.strip('`')}(" in tests


# ------------------------------------------------------------------- not_offered


def test_what_is_not_offered_is_not_there() -> None:
    assert CacheConfig().allow_network_filesystem is False
