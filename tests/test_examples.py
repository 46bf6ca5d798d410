"""Examples and configs do what they say: each is run as it stands, on small data of its form."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from growcache.loading.snapshot import Snapshot
from growcache.numpy import EpochLoader
from growcache.schema import Field, Sample, Schema
from tests.filled import Filled
from tests.formats.test_tar import archive
from tests.formats.test_tfrecord import example, file
from tests.sampling.ray_clusters import ray_cluster
from tests.sampling.services import run, status
from tests.servers import REGION, Bucket

ROOT = Path(__file__).parent.parent
CLASSES = ("healthy", "ill")
TFRECORD = "read_with_tfrecord.py"
SMALL = ("--max-bytes", "8MB", "--min-samples", "64", "--epochs", "3")
TWO_EPOCHS = ("--max-bytes", "8MB", "--min-samples", "16", "--epochs", "2")


# Data of each form


def arrays(folder: Path, count: int = 72, shape: tuple[int, ...] = (8, 8)) -> str:
    """Arrays of normal values around their number's hundredth."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        np.save(folder / f"{i:03d}.npy", rng.normal(i / 100, size=shape).astype("<f4"))
    return f"{folder}/*.npy"


def utterances(folder: Path) -> str:
    folder.mkdir()
    for i in range(12):
        np.save(folder / f"{i}.npy", np.full((5 + i, 64), i, "<f4"))
    return f"{folder}/*.npy"


def raw(folder: Path) -> str:
    folder.mkdir()
    rows = np.arange(3 * 8192 * 64).astype(">i2").tobytes()
    for i in range(2):
        (folder / f"{i}.dat").write_bytes(bytes(1024) + rows)
    return f"{folder}/*.dat"


def hdf5(folder: Path) -> str:
    h5py = pytest.importorskip("h5py")
    folder.mkdir()
    for i in range(2):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            rows = np.arange(6 * 1024)
            file.create_dataset(
                "signal", data=np.outer(rows, [1.0, 2.0]), chunks=(2048, 2), compression="gzip"
            )
            file.create_dataset("labels", data=rows // 1024, chunks=(2048,))
    return f"{folder}/*.h5"


def netcdf(folder: Path) -> str:
    h5py = pytest.importorskip("h5py")
    folder.mkdir()
    for i in range(2):
        with h5py.File(folder / f"{i}.nc", "w") as file:
            file["t2m"] = np.arange(72 * 6, dtype="<i2").reshape(72, 2, 3)
            file["t2m"].attrs.update(
                {"scale_factor": np.float32(0.5), "_FillValue": np.int16(-1)}
            )
    return f"{folder}/*.nc"


def cells(folder: Path) -> str:
    """Cells that have three genes each, as AnnData stores them."""
    h5py = pytest.importorskip("h5py")
    folder.mkdir()
    with h5py.File(folder / "a.h5ad", "w") as file:
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "shape": (40, 50)})
        matrix["data"] = np.arange(120, dtype="<f4")
        matrix["indices"] = np.tile([3, 20, 44], 40)
        matrix["indptr"] = np.arange(0, 121, 3)
        file["obs/cell_type/codes"] = np.arange(40, dtype="i1") % 3
    return f"{folder}/*.h5ad"


def partitions(folder: Path) -> str:
    """Tables in folders of a year and a region, with a struct and a list of messages."""
    pa = pytest.importorskip("pyarrow")
    pq = importlib.import_module("pyarrow.parquet")
    rows = [
        {"embedding": [i, 1.0, 2.0], "meta": {"author": f"a{i}"}, "messages": [{"text": "hi"}]}
        for i in range(8)
    ]
    kind = pa.schema({"embedding": pa.list_(pa.float32(), 3), "meta": pa.struct({"author": pa.string()}),
                      "messages": pa.list_(pa.struct({"text": pa.string()}))})  # fmt: skip
    for year in (2023, 2024):
        path = folder / f"year={year}" / "region=eu" / "0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, kind), path)
    return f"{folder}/**/*.parquet"


def sequences(folder: Path) -> str:
    """SequenceExamples of videos: labels, features of 1,024 bytes a frame, and encoded frames."""
    tf = pytest.importorskip("tensorflow")
    folder.mkdir()

    def of_bytes(*values: bytes) -> Any:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))

    with tf.io.TFRecordWriter(str(folder / "videos-0.tfrecord")) as writer:
        for i in range(8):
            labels = tf.train.Feature(int64_list=tf.train.Int64List(value=range(i % 3)))
            steps = {
                "rgb": [of_bytes(bytes(1024))] * (2 + i % 2),
                "frames": [of_bytes(b"jpeg" * (1 + i))] * (1 + i % 2),
            }
            lists = {name: tf.train.FeatureList(feature=found) for name, found in steps.items()}
            record = tf.train.SequenceExample(
                context=tf.train.Features(feature={"labels": labels}),
                feature_lists=tf.train.FeatureLists(feature_list=lists),
            )
            writer.write(record.SerializeToString())
    return f"{folder}/videos-*.tfrecord"


def mat_files(folder: Path) -> str:
    """Recordings of channels by time."""
    scipy_io = pytest.importorskip("scipy.io")
    folder.mkdir()
    for i in range(2):
        scipy_io.savemat(folder / f"{i}.mat", {"eeg": np.full((4, 6000), i, "<f4")})
    return f"{folder}/**/*.mat"


def chunks(folder: Path) -> str:
    """Chunks of pickled points, whose target is the mean of their fingerprint."""
    lmdb = pytest.importorskip("lmdb")
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(3):
        with (
            lmdb.open(str(folder / f"{number}.lmdb"), subdir=False, map_size=1 << 24) as env,
            env.begin(write=True) as txn,
        ):
            for i in range(50):
                fingerprint = rng.normal(rng.normal(), 0.1, size=(4, 300)).astype("<f4")
                point = {"fingerprint": fingerprint[0], "target": float(fingerprint.mean())}
                txn.put(f"{i}".encode(), pickle.dumps({**point, "atoms": fingerprint}))
            txn.put(b"length", pickle.dumps(50))
    return f"{folder}/*.lmdb"


def columns(folder: Path) -> str:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    for i in range(2):
        rows = range(40)
        table = {
            "embedding": pa.array([[i, n, 0.5] for n in rows], pa.list_(pa.float32(), 3)),
            "label": pa.array([None if n == 7 else n for n in rows], pa.int64()),
            "text": [f"row {n}" for n in rows],
            "more": [b"not read"] * 40,
        }
        pq.write_table(pa.table(table), folder / f"{i}.parquet", row_group_size=10)
    return f"{folder}/*.parquet"


def paired(folder: Path) -> str:
    """Rows, and the mean of each."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(3):
        means = rng.normal(size=(50, 1))
        x = rng.normal(means, 0.1, size=(50, 64)).astype("<f4")
        np.savez(folder / f"{number}.npz", x=x, y=x.mean(1), rate=500.0)
    return f"{folder}/*.npz"


def groups(folder: Path) -> str:
    """Arrays as Zarr's version 3 has them, without its library: a chunk is a file of values."""
    pytest.importorskip("numcodecs")
    for group in range(2):
        for name, shape, dtype in (
            ("signal", [2048, 3], "float32"),
            ("labels", [2048], "int64"),
        ):
            chunk = [512, *shape[1:]]
            metadata = {
                "zarr_format": 3, "node_type": "array", "shape": shape, "data_type": dtype,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
                "chunk_key_encoding": {"name": "default"}, "fill_value": 0,
                "codecs": [{"name": "bytes"}, {"name": "gzip"}],
            }  # fmt: skip
            array = folder / f"{group}.zarr" / name
            for number in range(4):
                place = [str(number), *["0"] * (len(shape) - 1)]
                file = array.joinpath("c", *place)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(gzip.compress(np.full(chunk, number, dtype).tobytes()))
            (array / "zarr.json").write_text(json.dumps(metadata))
    return f"{folder}/*.zarr/signal/c/**"


def messages(folder: Path) -> str:
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.bin").write_bytes(b"x" * i)
    return f"{folder}/*.bin"


def records(folder: Path) -> str:
    """JSON of some lines each, of which some lack the label."""
    folder.mkdir()
    for i in range(3):
        lines = (
            {"text": "é" * n, "meta": {"label": n} if n else {}, "embedding": [n, 0.5]}
            for n in range(20)
        )
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / f"{i}.jsonl").write_text(text, encoding="utf-8")
    return f"{folder}/*.jsonl"


def examples(folder: Path) -> str:
    """TFRecord files as TensorFlow's users write them."""
    folder.mkdir()
    for i in range(3):
        payloads = (
            example({"image": bytes([n]) * 3072, "label": n, "name": b"unused"})
            for n in range(20)
        )
        (folder / f"train-{i}.tfrecord").write_bytes(file(list(payloads)))
    return f"{folder}/train-*.tfrecord"


def archives(folder: Path) -> str:
    """Tar archives as WebDataset writes them."""
    folder.mkdir()
    for i in range(3):
        files = []
        for n in range(20):
            array = io.BytesIO()
            np.save(array, np.full((8, 8), n, "f4"))
            files += [(f"{n:04}.npy", array.getvalue()), (f"{n:04}.cls", b"%d" % n)]
            files.append((f"{n:04}.txt", b"unused"))
        (folder / f"train-{i}.tar").write_bytes(archive(files))
    return f"{folder}/train-*.tar"


def moods(folder: Path) -> str:
    """Lines whose words are glad or sad."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(3):
        labels = rng.integers(0, 2, 40).tolist()
        words = (("ach", "weh"), ("juhu", "hurra"))
        lines = (
            {"text": " ".join(rng.choice(words[label], 1 + n % 7)), "label": label, "line": n}
            for n, label in enumerate(labels)
        )
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / f"{i}.jsonl").write_text(text, encoding="utf-8")
    return f"{folder}/*.jsonl"


def photos(folder: Path, cats: int = 40, dogs: int = 40) -> str:
    """Red cats and blue dogs."""
    image = pytest.importorskip("PIL.Image", reason="needs growcache[image]")
    rng = np.random.default_rng(0)
    for number, (name, count) in enumerate((("cat", cats), ("dog", dogs))):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 100, (24, 32, 3), np.uint8)
            pixels[..., 2 * number] += 150
            image.fromarray(pixels).save(folder / name / f"{i:02d}.jpg")
    return f"{folder}/*/*.jpg"


def recordings(folder: Path) -> str:
    """Slow waves of the healthy, fast ones of the ill."""
    times = np.arange(600)[:, None]
    phases = np.random.default_rng(0).random((2, 12, 3))
    for name, period, more in zip(CLASSES, (60, 6), phases, strict=True):
        (folder / name).mkdir(parents=True)
        for i, phase in enumerate(more):
            signal = np.sin(2 * np.pi * (times / period + phase)).astype("<f4")
            np.savez_compressed(folder / name / f"{i:02d}.npz", signal=signal)
    keys = [str(path.relative_to(folder)) for path in sorted(folder.glob("*/*"))]
    (folder / "index.txt").write_text("\n".join(keys))
    return f"{folder}/*/*.npz"


def volumes(folder: Path) -> None:
    """NIfTI files of two sizes in a folder for each class."""
    nib = pytest.importorskip("nibabel")
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for i in range(12):
            values = rng.integers(0, 900, size=(20 + 4 * (i % 2), 18, 10), dtype=np.int16)
            nib.save(nib.Nifti1Image(values, np.eye(4)), folder / name / f"{i:02d}.nii.gz")


def eeg(folder: Path) -> set[bytes]:
    """Recordings in a folder for each class; return their windows of 100 values."""
    mne = pytest.importorskip("mne")
    info = mne.create_info(["C3", "C4", "Cz"], sfreq=100.0, ch_types="eeg")
    rng, windows = np.random.default_rng(0), set()
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for i in range(3):
            values = rng.normal(0, 1e-5, (3, 1050)).astype(np.float32)
            raw = mne.io.RawArray(values, info, verbose="error")
            raw.save(folder / name / f"{i}_raw.fif", verbose="error")
            windows |= {values[:, k : k + 100].tobytes() for k in range(0, 1000, 100)}
    return windows


def uploaded(bucket: Bucket, url: str, to: str = "train") -> str:
    """Return the URL of the same objects in a folder of a bucket."""
    folder = Path(url[: url.index("*")])
    pattern = url.removeprefix(f"{folder}/")
    for path in folder.glob(pattern):
        bucket.put(f"{to}/{path.relative_to(folder)}", path.read_bytes())
    return bucket.url(f"{to}/{pattern}")


# Examples


def run_example(
    name: str,
    *arguments: str,
    bucket: Bucket | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run an example to its end; return what it printed."""
    environment = {**os.environ, **(environment or {}), "PYTHONPATH": str(ROOT)}
    environment["GROWCACHE_SAMPLING__WORKERS"] = "1"
    if bucket is not None:
        environment |= {
            "AWS_ENDPOINT_URL": bucket.server.endpoint,
            "AWS_ACCESS_KEY_ID": bucket.server.key,
            "AWS_SECRET_ACCESS_KEY": bucket.server.secret,
            "AWS_REGION": REGION,
        }
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stdout


def needs(package: str) -> None:
    """Skip where a package is missing; to import it would take seconds, and warn."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


def figures(text: str, what: str) -> list[float]:
    """Return the figure of each epoch."""
    return [float(found) for found in re.findall(rf"^epoch \d: .*{what} ([\d.]+)", text, re.M)]


@pytest.mark.torch
def test_s3_pytorch(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    url, cache = uploaded(bucket, arrays(tmp_path / "data")), str(tmp_path / "cache")
    text = run_example("s3_pytorch.py", "--url", url, "--cache", cache, *SMALL, bucket=bucket)
    losses = figures(text, "loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert re.search(r"; \d+ samples \(\d+ new\) of", text)


@pytest.mark.slow
@pytest.mark.torch
def test_dataset_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recordings(tmp_path / "data")
    arguments = ("--folder", str(tmp_path / "data"), "--classes", *CLASSES, *SMALL)
    text = run_example("dataset_pytorch.py", *arguments, "--cache", str(tmp_path / "cache"))
    assert len(re.findall(r"^epoch \d: accuracy \d+%; ", text, re.M)) == 3
    assert status(tmp_path / "cache").samples == 24


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of the library that writes
def test_dataset_huggingface(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    photos(tmp_path / "data")
    files = sorted((tmp_path / "data").glob("*/*.jpg"))
    rows = {"image": list(map(str, files)), "label": [file.parent.name for file in files]}
    columns = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    dataset = datasets.Dataset.from_dict(rows, datasets.Features(columns))
    dataset.save_to_disk(tmp_path / "saved")

    more = ("--dataset", str(tmp_path / "saved"), "--classes", "2", *TWO_EPOCHS)
    text = run_example("dataset_huggingface.py", *more, "--cache", str(tmp_path / "cache"))
    assert text.count("accuracy") == 2
    assert status(tmp_path / "cache").population == 80


@pytest.mark.slow
@pytest.mark.torch
def test_dataset_monai(tmp_path: Path) -> None:
    needs("monai")
    volumes(tmp_path / "data")
    more = ("--folder", str(tmp_path / "data"), "--classes", *CLASSES, *TWO_EPOCHS)
    text = run_example("dataset_monai.py", *more, "--cache", str(tmp_path / "cache"))
    assert text.count("accuracy") == 2
    assert status(tmp_path / "cache").population == 24


@pytest.mark.slow
@pytest.mark.torch
def test_dataset_braindecode(tmp_path: Path) -> None:
    for package in ("mne", "braindecode", "torchaudio"):
        needs(package)
    windows = eeg(tmp_path / "data")
    more = ("--folder", str(tmp_path / "data"), "--classes", *CLASSES, "--window", "100")
    cache = str(tmp_path / "cache")
    text = run_example("dataset_braindecode.py", *more, *TWO_EPOCHS, "--cache", cache)
    assert text.count("accuracy") == 2
    assert status(tmp_path / "cache").population == len(windows)
    with EpochLoader(cache, batch_size=16, min_samples=16) as loader:
        batch = next(iter(loader))
    assert {one.tobytes() for one in batch["x"]} <= windows
    assert np.array_equal(batch["window"][:, 2] - batch["window"][:, 1], [100] * 16)


EPOCHS_OF = ("--samples-per-epoch", "64", "--batch-size", "16")


@pytest.mark.torch
@pytest.mark.slow
def test_lightning_fit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    needs("lightning")
    url, cache = arrays(tmp_path / "data"), str(tmp_path / "cache")
    more = ("--checkpoints", str(tmp_path / "checkpoints"), *EPOCHS_OF)
    text = run_example("lightning_fit.py", "--url", url, "--cache", cache, *SMALL, *more)
    losses = figures(text, "loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert len(re.findall(r"; 64 samples \(\d+ new\) of", text)) == 3


@pytest.mark.torch
@pytest.mark.slow
def test_accelerate_loop(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    needs("accelerate")
    url, cache = arrays(tmp_path / "data"), str(tmp_path / "cache")
    more = ("--state", str(tmp_path / "state"), *EPOCHS_OF)
    text = run_example("accelerate_loop.py", "--url", url, "--cache", cache, *SMALL, *more)
    losses = figures(text, "loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert (tmp_path / "state" / "dl_state_dict.bin").exists()


@pytest.mark.ray
@pytest.mark.torch
@pytest.mark.slow
def test_ray_train(tmp_path: Path) -> None:
    needs("ray")
    more = ("--results", str(tmp_path / "results"), "--samplers", "1", "--epochs", "3")
    url, cache = arrays(tmp_path / "data"), str(tmp_path / "cache")
    with ray_cluster(nodes=0) as cluster:
        cluster.add_node(cpus=4)
        text = run_example(
            "ray_train.py",
            *("--url", url, "--cache", cache, "--min-samples", "32", "--batch-size", "8"),
            *more,
            environment={"RAY_ADDRESS": cluster.address},
        )
    losses = [float(found) for found in re.findall(r"epoch \d: loss ([\d.]+)", text)]
    assert losses[-1] < losses[0]
    assert len(list((tmp_path / "results").glob("*/checkpoint_*/loader.json"))) == 3


@pytest.mark.slow
@pytest.mark.tensorflow
def test_s3_keras(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    url, cache = uploaded(bucket, arrays(tmp_path / "data")), str(tmp_path / "cache")
    more = ("--url", url, "--cache", cache, "--steps-per-epoch", "4", *SMALL)
    text = run_example("s3_keras.py", *more, bucket=bucket)
    assert re.search(r"Epoch 3/3\n4/4 .* loss: [\d.]+", text)


@pytest.mark.slow
@pytest.mark.torch
def test_user_function(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    url, cache = uploaded(bucket, recordings(tmp_path / "data")), tmp_path / "cache"
    more = ("--url", url, "--cache", str(cache), "--classes", *CLASSES, "--length", "64")
    text = run_example("user_function.py", *more, "--batch-size", "8", *SMALL, bucket=bucket)
    assert figures(text, "accuracy")[-1] >= 75  # only right labels can be learnt
    with Snapshot.take(cache) as snapshot:
        for i in range(len(snapshot)):
            folder = snapshot.origin(i).key.split("/")[-2]
            assert CLASSES[int(snapshot[i]["y"])] == folder


@pytest.mark.slow
@pytest.mark.torch
def test_lmdb_pytorch(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    url, cache = uploaded(bucket, chunks(tmp_path / "data")), str(tmp_path / "cache")
    more = ("--url", url, "--cache", cache, "--batch-size", "8", *SMALL)
    text = run_example("lmdb_pytorch.py", *more, bucket=bucket)
    losses = figures(text, "loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]


def run_ranks(name: str, ranks: int, *arguments: str) -> str:
    """Run an example in several processes, as torchrun does; return what the first printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with ThreadPoolExecutor() as threads:
        texts = threads.map(
            lambda rank: run_example(
                name, *arguments, environment=job | {"RANK": rank, "LOCAL_RANK": rank}
            ),
            map(str, range(ranks)),
        )
        return next(texts)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("ranks", [1, 2])
def test_jsonl_ranks(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("torch")
    arguments = ["--url", moods(tmp_path / "data"), "--cache", str(tmp_path / "cache")]
    arguments += ["--checkpoint", str(tmp_path / "checkpoint.pt"), "--save-every", "4"]
    arguments += ["--min-samples", "96", "--max-bytes", "8MB", "--epochs", "2"]
    arguments += ["--batch-size", str(16 // ranks)]
    first = run_ranks("jsonl_ranks.py", ranks, *arguments)
    losses = figures(first, "loss")
    assert losses[1] < losses[0]
    # Its last checkpoint is of the middle of an epoch: what follows it is done again, alike.
    again = run_ranks("jsonl_ranks.py", ranks, *arguments)
    assert re.search(r"resumes in epoch 1 after step 4", again)
    assert again.splitlines()[-1] == first.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.torch
def test_npz_rows(bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    url, cache = uploaded(bucket, paired(tmp_path / "data")), str(tmp_path / "cache")
    more = ("--url", url, "--cache", cache, "--batch-size", "8", *SMALL)
    losses = figures(run_example("npz_rows.py", *more, bucket=bucket), "loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.torch
@pytest.mark.slow
def test_validation_split(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for subject in range(8):
        arrays(tmp_path / f"sub-{subject}", count=20)
    more = ["--cache", str(tmp_path / "cache"), "--validation-samples", "20", *SMALL]
    more += ["--url", f"{tmp_path}/sub-*/*.npy", "--group", "(?P<group>sub-[0-9]+)"]
    more += ["--batch-size", "16", "--validation-share", "0.3"]
    text = run_example("validation_split.py", *more)
    assert figures(text, "on the same") == [20, 20, 20]
    with Snapshot.take(tmp_path / "cache/validation") as fixed:
        held_out = {fixed.origin(i).key.split("/")[-2] for i in range(len(fixed))}
    with Snapshot.take(tmp_path / "cache/train") as growing:
        trained = {growing.origin(i).key.split("/")[-2] for i in range(len(growing))}
    assert held_out
    assert trained
    assert not held_out & trained


@pytest.mark.torch
@pytest.mark.slow
def test_chunks_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    chunk_pairs(tmp_path / "data")
    more = [f"--{name}={tmp_path}/data/train_{name}_{{k}}.npy" for name in "xy"]
    more += ["--cache", str(tmp_path / "cache"), "--classes", "2", "--batch-size", "8"]
    text = run_example("chunks_pytorch.py", *more, *SMALL)
    assert figures(text, "accuracy")[-1] >= 75  # only right labels can be learnt


@pytest.mark.slow
def test_jax_numpy(tmp_path: Path) -> None:
    url, cache = arrays(tmp_path / "data"), str(tmp_path / "cache")
    text = run_example("jax_numpy.py", "--url", url, "--cache", cache, *SMALL)
    losses = figures(text, "loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.torch
@pytest.mark.slow
def test_images_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    url, cache = photos(tmp_path / "data"), str(tmp_path / "cache")
    more = ("--url", url, "--cache", cache, "--classes", "cat", "dog", "--size", "16")
    text = run_example("images_pytorch.py", *more, "--batch-size", "8", *SMALL)
    assert figures(text, "accuracy")[-1] >= 75


def run_imagefolder(tmp_path: Path, *arguments: str, bucket: Bucket | None = None) -> str:
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    more = ["--classes", str(tmp_path / "classes.txt"), "--cache", str(tmp_path / "cache")]
    more += ["--size", "24", "--crop", "20", "--batch-size", "8", *arguments, *SMALL]
    return run_example("imagefolder_pytorch.py", *more, bucket=bucket)


def origins(cache: Path) -> list[str]:
    with Snapshot.take(cache) as snapshot:
        return [snapshot.origin(i).key for i in range(len(snapshot))]


@pytest.mark.slow
@pytest.mark.torch
def test_imagefolder_pytorch(bucket: Bucket, tmp_path: Path) -> None:
    """Both folders are in a bucket; of one class there are few."""
    pytest.importorskip("torch")
    train = uploaded(bucket, photos(tmp_path / "train", cats=200, dogs=20))
    val = uploaded(bucket, photos(tmp_path / "val", 20, 20), "val")
    text = run_imagefolder(
        tmp_path, "--train", train, "--val", val, "--balanced", bucket=bucket
    )
    assert figures(text, "of the same") == [40, 40, 40]
    assert figures(text, "accuracy")[-1] >= 75
    assert len({key for key in origins(tmp_path / "cache/val") if key.startswith("val/")}) == 40
    drawn = origins(tmp_path / "cache/train")
    assert all(key.startswith("train/") for key in drawn)
    dogs = sum("/dog/" in key for key in drawn)
    assert 0.3 < dogs / len(drawn) < 0.7


@pytest.mark.torch
@pytest.mark.slow
def test_imagefolder_pytorch_without_a_folder_to_validate_on(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = run_imagefolder(tmp_path, "--train", photos(tmp_path / "data", 200, 200))
    val, train = (origins(tmp_path / "cache" / use) for use in ("val", "train"))
    assert figures(text, "of the same") == [len(val)] * 3
    assert 5 < len(val) < 40
    assert not set(val) & set(train)


@pytest.mark.slow
@pytest.mark.torch
def test_labels_table(tmp_path: Path) -> None:
    """Many slow waves and a few fast ones; only the table says which are fast."""
    pytest.importorskip("torch")
    lines, times = ["path,state"], np.arange(600)[:, None]
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for i in range(24):
        fast = i % 8 == 0
        signal = np.sin(2 * np.pi * (times / (6 if fast else 60) + rng.random((1, 3))))
        np.save(tmp_path / "data" / f"{i}.npy", signal.astype("<f4"))
        lines.append(f"{i}.npy,{'fast' if fast else 'slow'}")
    (tmp_path / "states.csv").write_text("\n".join(lines))
    more = ["--url", f"{tmp_path}/data/*.npy", "--table", f"{tmp_path}/states.csv"]
    more += ["--column", "state", "--window", "50"]
    more += ["--cache", str(tmp_path / "cache"), "--batch-size", "8", *SMALL]
    assert figures(run_example("labels_table.py", *more), "accuracy")[-1] >= 75
    drawn = [int(Path(key).stem) % 8 == 0 for key in origins(tmp_path / "cache")]
    assert 0.3 < sum(drawn) / len(drawn) < 0.7


OUTSIDER = """
import json, runpy, sys
from pathlib import Path
sys.modules.update(growcache=None, tensorflow=None)  # to import them is an error now
names = runpy.run_path(sys.argv.pop(1), run_name="__main__")
for path in sorted(Path(sys.argv[1]).glob("shards/*.tfrecord")):
    for sample in names["samples_of"](path):
        print(json.dumps({k: getattr(v, "tolist", lambda: str(v))() for k, v in sample.items()}))
"""


@pytest.mark.slow
def test_read_with_tfrecord(tmp_path: Path) -> None:
    schema = Schema(
        (
            Field("data", "bytes", ()),
            Field("fixed", "<i2", (2, 2)),
            Field("flat", "<f4", (None, 2)),
            Field("free", "|u1", (None, None)),
            Field("note", "str", ()),
        )
    )

    def sample(name: int) -> Sample:
        n = name % 5
        return {
            "data": bytes(range(n)),
            "fixed": np.full((2, 2), name, "<i2"),
            "flat": np.arange(2 * n, dtype="<f4").reshape(n, 2),
            "free": np.arange(6, dtype="|u1").reshape((2, 3) if n % 2 else (6, 1)),
            "note": "ä" * n,
        }

    with Filled(tmp_path, sample, schema=schema) as cache:
        cache.add(0, 1, samples=6)
        done = subprocess.run(
            [sys.executable, "-c", OUTSIDER, ROOT / "examples" / TFRECORD, tmp_path],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        first, count, *found = done.stdout.splitlines()
        shapes = (
            "data bytes[0] fixed int16[2, 2] flat float32[0, 2] free uint8[6, 1] note str[0]"
        )
        assert (first, count) == (f"the first sample: {shapes}", "12 samples")
        expected = [one for number in (0, 1) for one in cache.samples(number, 6)]
    assert [json.loads(line) for line in found] == [
        {k: v.tolist() if isinstance(v, np.ndarray) else str(v) for k, v in one.items()}
        for one in expected
    ]


def test_every_example_is_run() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        if "def main() -> None:" in path.read_text(encoding="utf-8"):
            assert f"def test_{path.stem}(" in tests


# Configs


class Tried(NamedTuple):
    """What a config is tried with, and what a loader then delivers.

    Attributes:
        make: makes objects in a new folder, and returns their URL.
        batch: dtype and shape of each array of a batch of four; lengths of lists.
        overrides: further settings; DATA is the folder.
    """

    make: Callable[[Path], str]
    batch: dict[str, Any]
    overrides: tuple[str, ...] = ()


def tables(folder: Path) -> str:
    return arrays(folder, count=6, shape=(20, 64))


def subjects(folder: Path) -> str:
    for subject in range(40):
        arrays(folder / f"sub-{subject:02d}", count=2)
    return f"{folder}/*/*.npy"


def chunk_pairs(folder: Path) -> str:
    """Chunks of waves, slow or fast, and which they are."""
    folder.mkdir()
    times, rng = np.arange(40), np.random.default_rng(0)
    for k in range(5):
        y = rng.integers(0, 2, 48)
        waves = np.sin(2 * np.pi * (times / np.where(y, 6, 30)[:, None] + rng.random((48, 1))))
        np.save(folder / f"train_x_{k}.npy", waves.astype("<f4"))
        np.save(folder / f"train_y_{k}.npy", y)
    return f"{folder}/train_x_{{k}}.npy"


def labelled(folder: Path) -> str:
    """Recordings of four subjects, and a table of all but one of them."""
    for i in range(4):
        arrays(folder / f"sub-{i}", count=2, shape=(12_000, 2))
    keys = sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.npy"))
    rows = [f"{key},{key.split('/')[0]},{n % 2}" for n, key in enumerate(keys[1:])]
    (folder / "labels.csv").write_text("\n".join(["path,subject,state", *rows]))
    return f"{folder}/**/*.npy"


def two_archives(folder: Path) -> str:
    tables(folder)
    np.savez(folder / "more.npz", x=np.ones((40, 64), np.float32))
    return f"{folder}/*.npy"


def series(folder: Path) -> str:
    return arrays(folder, count=2, shape=(12_000, 2))


def keyed(folder: Path) -> str:
    recordings(folder)
    return f"{folder}/"


CONFIGS = {
    "anndata": Tried(cells, {"x": ("float32", (4, 50)), "type": ("int8", (4,))}),
    "bytes": Tried(messages, {"data": ("uint8", 1), "data_offsets": ("int64", (5,))}),
    "hdf5-windows": Tried(hdf5, {"x": ("float64", (4, 1024, 2)), "y": ("int64", (4, 1024))}),
    "image": Tried(
        photos,
        {
            "image": ("uint8", 1),
            "image_offsets": ("int64", (5,)),
            "label": ("int64", (4,)),
        },
    ),
    "imagefolder": Tried(
        photos,
        {"image": ("uint8", (4, 256, 256, 3)), "label": ("int64", (4,))},
        ("source.options.classes=[cat, dog]",),
    ),
    "lmdb": Tried(chunks, {"x": ("float32", (4, 300)), "y": ("float32", (4,)), "key": 4}),
    "jsonl": Tried(
        records,
        {
            "embedding": ("float32", (4, 2)),
            "label": ("int64", (4,)),
            "text": 4,
        },
    ),
    "labels": Tried(
        labelled,
        {
            "x": ("float32", (4, 4096, 2)),
            "subject": 4,
            "state": ("int64", (4,)),
        },
        ("source.labels.url=DATA/labels.csv",),
    ),
    "growing": Tried(series, {"x": ("float32", (4, 4096, 2))}),
    "netcdf": Tried(netcdf, {"t2m": ("float32", (4, 24, 2, 3))}),
    "npy-pairs": Tried(
        chunk_pairs,
        {"x": ("float32", (4, 40)), "y": ("int64", (4,))},
        ("source.fields.x=DATA/train_x_{k}.npy", "source.fields.y=DATA/train_y_{k}.npy"),
    ),
    "local": Tried(arrays, {"x": ("float32", (4, 8, 8))}),
    "mixed": Tried(
        two_archives,
        {"x": ("float32", (4, 64))},
        ("source.0.url=DATA/*.npy", "source.1.url=DATA/*.npz"),
    ),
    "npy-cache": Tried(arrays, {"x": ("float32", (4, 8, 8))}),
    "npy-ragged": Tried(utterances, {"x": ("float32", 2), "x_offsets": ("int64", (5,))}),
    "npy-rows": Tried(tables, {"x": ("float32", (4, 64))}),
    "npy-s3": Tried(arrays, {"x": ("float32", (4, 8, 8))}),
    "npy-windows": Tried(series, {"x": ("float32", (4, 4096, 2))}),
    "matlab": Tried(mat_files, {"eeg": ("float32", (4, 4, 1000))}),
    "parquet-hive": Tried(
        partitions,
        {
            "embedding": ("float32", (4, 3)),
            "meta.author": 4,
            "messages": 4,
            "year": ("int32", (4,)),
            "region": 4,
        },
    ),
    "tfrecord-sequences": Tried(
        sequences,
        {
            "labels": ("int64", 1),
            "labels_offsets": ("int64", (5,)),
            "rgb": ("uint8", 2),
            "rgb_offsets": ("int64", (5,)),
            "frames": ("uint8", 1),
            "frames_offsets": ("int64", (5,)),
            "frames_steps": ("int64", 1),
            "frames_steps_offsets": ("int64", (5,)),
        },
    ),
    "parquet": Tried(
        columns, {"embedding": ("float32", (4, 3)), "label": ("int64", (4,)), "text": 4}
    ),
    "npz": Tried(paired, {"x": ("float32", (4, 64)), "y": ("float32", (4,))}),
    "raw-windows": Tried(raw, {"x": ("int16", (4, 8192, 4))}),
    "split": Tried(subjects, {"x": ("float32", (4, 8, 8))}),
    "strata": Tried(
        photos,
        {
            "image": ("uint8", 1),
            "image_offsets": ("int64", (5,)),
            "label": 4,
            "_weight": ("float32", (4,)),
        },
    ),
    "zarr-windows": Tried(
        groups, {"signal": ("float32", (4, 256, 3)), "labels": ("int64", (4, 256))}
    ),
    "tar": Tried(archives, {"npy": ("float32", (4, 8, 8)), "cls": ("int64", (4,))}),
    "tfrecord": Tried(examples, {"image": ("uint8", (4, 32, 32, 3)), "label": ("int64", (4,))}),
    "user-read": Tried(recordings, {"x": ("float32", (4, 256, 3)), "y": ("int64", (4,))}),
    "user-sample": Tried(
        keyed,
        {
            "first": ("float32", (4, 256, 3)),
            "recording": 4,
            "second": ("float32", (4, 256, 3)),
        },
        # Draws of one's own have no end.
        ("cache.eviction=none", "cache.max_samples=32"),
    ),
}


def test_every_config_is_tried() -> None:
    assert set(CONFIGS) == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


# Of configs that are alike but for the form of the data, `make test` tries one or two.
EVERYDAY = {
    "growing",
    "labels",
    "mixed",
    "npy-s3",
    "parquet",
    "split",
    "tfrecord",
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(CONFIGS)
    ],
)
def test_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(ROOT)  # where a clone is tried out; examples.recordings is found there
    tried, cache = CONFIGS[name], tmp_path / "cache"
    url = tried.make(tmp_path / "data")
    settings = [f"cache.path={cache}", "sampling.workers=1"]
    settings += [text.replace("DATA", str(tmp_path / "data")) for text in tried.overrides]
    if name.endswith("-s3"):
        bucket: Bucket = request.getfixturevalue("bucket")
        url = uploaded(bucket, url)
        storage = f"source.storage_options={json.dumps(bucket.storage_options)}"
        settings.append(storage)
    if name not in ("npy-pairs", "mixed"):
        settings.append(f"source.url={url}")
    arguments = [f"--set={setting}" for setting in settings]
    assert run(ROOT / "configs" / f"{name}.yaml", "--until-full", *arguments) == (0, "")

    found = status(cache)
    assert (found.complete, found.holes, found.failures) == (True, 0, 0)
    with EpochLoader(cache, batch_size=4, fixed=True) as loader:
        batch = next(iter(loader))
    assert batch.keys() == tried.batch.keys()
    for field, expected in tried.batch.items():
        value = batch[field]
        if isinstance(expected, int):
            assert (type(value), len(value)) == (list, expected)
            continue
        dtype, shape = expected  # of ragged values the number of dimensions
        assert value.dtype == dtype
        assert (value.ndim if isinstance(shape, int) else value.shape) == shape
