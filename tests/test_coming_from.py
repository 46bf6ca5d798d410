"""The pages of docs/coming_from: short, and both halves of each program run on the same data."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.formats.test_tar import archive
from tests.formats.test_tfrecord import example, file
from tests.tables import DOCS

ROOT = Path(__file__).parent.parent
FOLDER = DOCS / "coming_from"
NAMES = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "index")
PAGES = {name: (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
PROGRAM = re.compile(r"^\*\*(Both|With [^*]+)\b[^\n]*\n\n```python\n(.*?)^```", re.M | re.S)
MODULES = {
    "dataloader": "torch",
    "huggingface_datasets": "datasets",
    "litdata": "litdata",
    "monai": "monai",
    "mosaicml_streaming": "streaming",
    "tf_data": "tensorflow",
    "webdataset": "webdataset",
}
SAMPLES = 128

# The module of the reader's own that the programs import: labels must be those of their samples.
MY_PROJECT = """
import torch

def step(x, y):
    x, y = torch.as_tensor(x).float(), torch.as_tensor(y)
    if x.ndim == 2:
        assert torch.equal(x.mean(1) > 0.5, y == 1), (x.mean(1), y)
    print("step", len(y), flush=True)
"""


def halves(name: str) -> tuple[str, str]:
    """The two programs of a page: the other loader's and growcache's."""
    found = PROGRAM.findall(PAGES[name])
    both = "".join(code for title, code in found if title == "Both")
    theirs, ours = (both + "\n" + code for title, code in found if title != "Both")
    return theirs, ours


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_short_and_its_programs_compile(name: str) -> None:
    prose = re.sub(r"^```.*?^```", "", PAGES[name], flags=re.M | re.S)
    assert len(prose.split()) <= 350
    for program in halves(name):
        compile(program, name, "exec")
        assert max(map(len, program.splitlines())) <= 60  # they stand side by side


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_which_version_it_compares(name: str) -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for path in (ROOT / "benchmarks/peers/environments").glob("*.txt"):
        pins += path.read_text(encoding="utf-8")
    package, version = re.findall(r"\b([a-z-]+) (\d+\.\d+\.\d+)\b", PAGES[name])[0]
    assert re.search(rf"^{package}(-cpu)?=={re.escape(version)}$", pins, re.M)


def sample(number: int) -> tuple[np.ndarray, int]:
    y = number % 2
    return np.random.default_rng(number).normal(y, 0.1, 32).astype("<f4"), y


def npz(folder: Path) -> None:
    for i in range(SAMPLES):
        x, y = sample(i)
        np.savez(folder / f"{i:03}.npz", x=x, y=np.int64(y))


def tars(folder: Path) -> None:
    for shard in range(8):
        files = []
        for i in range(shard, SAMPLES, 8):
            x, y = sample(i)
            array = io.BytesIO()
            np.save(array, x)
            files += [(f"{i:03}.npy", array.getvalue()), (f"{i:03}.cls", b"%d" % y)]
        (folder / f"train-{shard:02}.tar").write_bytes(archive(files))


def tfrecords(folder: Path) -> None:
    for shard in range(4):
        pairs = [sample(i) for i in range(shard, SAMPLES, 4)]
        payloads = [example({"x": x.tobytes(), "y": y}) for x, y in pairs]
        (folder / f"train-{shard}.tfrecord").write_bytes(file(payloads))


def tables(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for shard in range(4):
        xs, ys = zip(*(sample(i) for i in range(shard, SAMPLES, 4)), strict=True)
        columns = {"x": pa.array([x.tolist() for x in xs], pa.list_(pa.float32(), 32)), "y": ys}
        pq.write_table(pa.table(columns), folder / f"train-{shard}.parquet", row_group_size=8)


def volumes(folder: Path) -> None:
    nib = pytest.importorskip("nibabel")
    rng = np.random.default_rng(0)
    for name in ("healthy", "ill"):
        (folder / name).mkdir()
        for i in range(12):
            values = rng.integers(0, 900, size=(20, 18, 10), dtype=np.int16)
            nib.save(nib.Nifti1Image(values, np.eye(4)), folder / name / f"{i:02}.nii.gz")


# The folder of the bucket where the programs say that their data is, and what makes it there.
DATA = {
    "dataloader": ("recordings", npz),
    "huggingface_datasets": ("", tables),
    "litdata": ("samples", npz),
    "monai": ("scans", volumes),
    "mosaicml_streaming": ("samples", npz),
    "tf_data": ("", tfrecords),
    "webdataset": ("", tars),
}


def on_this_machine(program: str, bucket: Path) -> str:
    """The program with a folder instead of a bucket, and as many processes as tests can spare."""
    changes = {
        "pipe:aws s3 cp ": "",
        ".tar -": ".tar",
        "s3://my-bucket": str(bucket),
        "gs://my-bucket": str(bucket),
        "/mnt/slow": str(bucket),
        '"50GB"': '"20MB"',
        "steps_per_epoch=100": "steps_per_epoch=2",
        "workers=4": "workers=1",
    }
    for before, after in changes.items():
        program = program.replace(before, after)
    return program


def run(program: str, name: str, home: Path) -> str:
    folder, make = DATA[name]
    data = home / "bucket" / folder
    data.mkdir(parents=True)
    make(data)
    (home / "my_project.py").write_text(MY_PROJECT)
    script = home / "train.py"
    script.write_text(on_this_machine(program, home / "bucket"))
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=home,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{home}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_trained(printed: str, name: str) -> None:
    if name == "tf_data":
        assert "Epoch 3/3" in printed
    else:
        assert len(re.findall(r"^step \d+$", printed, re.M)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_half_of_growcache_runs(name: str, tmp_path: Path) -> None:
    if name in ("tf_data", "monai"):
        pytest.importorskip(MODULES[name])
    pytest.importorskip("torch")
    assert_trained(run(halves(name)[1], name, tmp_path), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_other_half_runs_where_its_library_is_installed(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(MODULES[name]) is None:
        pytest.skip(f"needs {MODULES[name]}")
    assert_trained(run(halves(name)[0], name, tmp_path), name)
