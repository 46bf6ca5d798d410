"""A sample made again from its object: equal, different, changed, gone."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from growcache.cli.cli import main
from growcache.cli.peek import sample_at
from growcache.cli.redraw_sample import differences
from growcache.numpy import EpochLoader
from tests.servers import Bucket, S3Server

TRANSFORM = """
import numpy as np

def noisy(sample, rng):
    return {"x": (sample["x"] + rng.normal(size=sample["x"].shape)).astype("<f4"), "n": 1}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with recordings, a transform that draws at random, and a filled cache."""
    (tmp_path / "data").mkdir()
    for i in range(6):
        rows = np.random.default_rng(i).normal(size=(64, 8)).astype("<f4")
        np.save(tmp_path / "data" / f"{i}.npy", rows)
    (tmp_path / "noise_of_mine.py").write_text(TRANSFORM)
    (tmp_path / "growcache.yaml").write_text(
        "source: {url: 'data/*.npy', options: {axis: 0}}\n"
        "sampling: {transform: 'noise_of_mine:noisy', samples_per_object: 4, seed: 7}\n"
        "cache: {path: cache, max_bytes: 60MB}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "growcache.yaml", "--until-full"]) == 0
    yield tmp_path
    sys.modules.pop("noise_of_mine", None)
    while str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def peek(*more: str) -> int:
    named = [] if "--config" in more else ["--config", "growcache.yaml"]
    return main(["peek", "cache", "--refetch", *named, *more])


def test_every_sample_can_be_made_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = sorted(int(path.stem) for path in (here / "cache" / "shards").glob("*.json"))
    capsys.readouterr()
    for place in (f"{shards[0]}:0", f"{shards[-1]}:1"):
        assert peek("--sample", place) == 0
        assert f"sample {place} is equal: " in capsys.readouterr().out
        assert peek("--sample", place, "--config", "growcache.yaml", "--json") == 0
        assert json.loads(capsys.readouterr().out)["refetched"] == "equal"


def test_an_object_that_is_gone_or_rewritten_is_told_of(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(sample_at(here / "cache", "0:0").origin.key)
    data = path.read_bytes()
    path.unlink()
    assert peek("--sample", "0:0") == 1
    assert f"is gone: {path} does not exist" in capsys.readouterr().out
    path.write_bytes(data[:-4] + b"\0\0\0\0")
    assert peek("--sample", "0:0") == 1
    assert "is changed: " in capsys.readouterr().out


def test_a_cached_sample_that_was_damaged_differs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (here / "cache" / "shards").glob("00000000.tfrecord")
    needle = sample_at(here / "cache", "0:0").sample["x"].tobytes()
    data = file.read_bytes()
    assert data.count(needle) == 1
    file.write_bytes(data.replace(needle, b"\0\0\0\0" + needle[4:]))
    assert peek("--sample", "0:0") == 1
    assert (
        "x: the cached and the redrawn value differ in 1 of 8 values" in capsys.readouterr().out
    )


def test_another_configuration_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = here / "growcache.yaml"
    config.write_text(config.read_text().replace("seed: 7", "seed: 8"))
    assert peek("--sample", "0:0", "--config", "growcache.yaml") == 2
    assert "sampling.seed (7 → 8)" in capsys.readouterr().err
    config.write_text(config.read_text().replace("seed: 8", "seed: 7"))
    (here / "noise_of_mine.py").write_text(TRANSFORM + "\nANOTHER = 1\n")
    assert peek("--sample", "0:0") == 2
    assert "the source of noise_of_mine:noisy has changed" in capsys.readouterr().err


def test_from_a_bucket_with_its_config(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "a.npy", np.arange(100, dtype="<f4"))
    for i in range(8):
        bucket.put(f"in/{i}.npy", (tmp_path / "a.npy").read_bytes())
    (tmp_path / "growcache.yaml").write_text(
        json.dumps(
            {
                "source": {
                    "url": [bucket.url("none/x*.npy"), bucket.url("in/*.npy")],
                    "storage_options": bucket.storage_options,
                },
                "cache": {"path": "cache", "max_bytes": "20MB"},
            }
        )
    )
    assert main(["run", "growcache.yaml", "--until-full"]) == 0
    assert peek("--sample", "0:0", "--config", "growcache.yaml") == 0
    bucket.delete(sample_at(tmp_path / "cache", "0:0").origin.key)
    assert peek("--sample", "0:0", "--config", "growcache.yaml") == 1
    assert "is gone" in capsys.readouterr().out


def test_from_two_buckets_whose_keys_are_alike(
    moto_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    buckets = [Bucket.make(moto_server) for _ in range(2)]
    for number, bucket in enumerate(buckets):
        for i in range(4):
            np.save(tmp_path / "a.npy", np.array([number, i], "<f4"))
            bucket.put(f"in/{i}.npy", (tmp_path / "a.npy").read_bytes())
    options = {"storage_options": moto_server.storage_options}
    values = {
        "source": [{"url": bucket.url("in/*.npy"), **options} for bucket in buckets],
        "cache": {"path": "cache", "max_bytes": "20MB"},
    }
    (tmp_path / "growcache.yaml").write_text(json.dumps(values))
    assert main(["run", "growcache.yaml", "--until-full"]) == 0
    drawn = [sample_at(tmp_path / "cache", f"0:{i}").sample["x"] for i in range(8)]
    assert {int(np.asarray(x)[0]) for x in drawn} == {0, 1}
    assert main(["export", "cache", "exported"]) == 0
    for i in range(8):
        assert peek("--sample", f"0:{i}", "--config", "growcache.yaml") == 0
        exported = ("exported", "--sample", f"0:{i}", "--config", "growcache.yaml")
        assert main(["peek", *exported, "--refetch"]) == 0  # without the listing
    with EpochLoader(tmp_path / "cache", batch_size=4) as loader:
        assert {int(x) for batch in loader for x in batch["x"][:, 0]} == {0, 1}
        assert loader.report.coverage_objects == 1.0
    for bucket in buckets:
        bucket.remove()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--refetch"], "--refetch needs --sample"),
        (["--config", "c.yaml"], "--config is only for --refetch"),
    ],
)
def test_options_that_need_each_other(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["peek", "cache", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_differences_name_what_differs() -> None:
    one = {"a": np.arange(3), "b": b"x", "s": "t"}
    assert differences(one, dict(one)) == []
    found = differences(one, {"a": np.arange(4), "b": b"y"})
    assert [text.partition(":")[0] for text in found] == ["a", "b", "s"]
    assert "int64[3], int64[4]" in found[0]
    same = {"a": np.array([np.nan])}
    assert differences(same, {"a": np.array([np.nan])}) == []
