"""A copy of a cache: whole or not there, readable by anybody, usable as a cache."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache import Snapshot
from growcache.cache.lease_views import read_leases
from growcache.cli.cli import main
from growcache.cli.export import export_cache, tfrecord_program
from growcache.errors import CacheFullError, CacheMissingError, ConfigError, CorruptShardError
from growcache.schema import Schema
from tests.cli.terminals import terminal
from tests.filled import Filled
from tests.ragged import SCHEMAS, ragged_cache


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    with Filled(tmp_path / "cache") as made:
        made.add(0, 1, 2, 5)
        yield made


def names_in(path: Path) -> list[int]:
    with Snapshot.take(path) as snapshot:
        return [int(snapshot[i]["id"]) for i in range(len(snapshot))]


def test_a_copy_has_the_same_samples_and_is_a_complete_cache(
    filled: Filled, tmp_path: Path
) -> None:
    said = export_cache(filled.root, tmp_path / "copy")
    assert "40 samples in 4 shards" in said
    filled.close()
    assert names_in(tmp_path / "copy") == names_in(filled.root)
    assert main(["check", str(tmp_path / "copy")]) == 0
    assert main(["peek", str(tmp_path / "copy")]) == 0
    with Snapshot.take(tmp_path / "copy") as snapshot:
        assert snapshot.view.complete
        assert snapshot.origin(39).key == "object-5-9"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "copy"]


def test_a_loader_takes_a_copy_as_a_fixed_set(filled: Filled, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from growcache.torch import EpochLoader

    export_cache(filled.root, tmp_path / "copy", samples=15)
    with EpochLoader(tmp_path / "copy", batch_size=4, min_samples=10**6) as loader:
        found = torch.cat([batch["id"] for batch in loader])
    assert sorted(found.tolist()) == [*range(2000, 2010), *range(5000, 5010)]


def test_so_many_samples_are_the_newest_whole_shards(filled: Filled, tmp_path: Path) -> None:
    assert "20 samples in 2 shards" in export_cache(filled.root, tmp_path / "a", samples=11)
    assert "10 samples in 1 shard" in export_cache(filled.root, tmp_path / "b", samples=1)
    assert "40 samples in 4 shards" in export_cache(filled.root, tmp_path / "c", samples=99)


def test_the_shards_are_held_while_they_are_copied_and_no_use_is_counted(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []
    original = shutil.copyfile

    def copyfile(source: Path, target: Path) -> None:
        held.extend(lease.job for lease in read_leases(filled.root) if lease.open)
        original(source, target)

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    export_cache(filled.root, tmp_path / "copy")
    assert set(held) == {""}
    assert set(filled.uses().values()) == {0}


def test_the_manifest_lists_what_is_there(filled: Filled, tmp_path: Path) -> None:
    export_cache(filled.root, tmp_path / "copy")
    manifest = json.loads((tmp_path / "copy" / "manifest.json").read_bytes())
    assert (manifest["samples"], manifest["format"]) == (40, "tfrecord")
    assert Schema.from_json(manifest["schema"]) == filled.schema
    listed = {
        name: size for shard in manifest["shards"] for name, size in shard["files"].items()
    }
    there = (path for path in (tmp_path / "copy" / "shards").rglob("*") if path.is_file())
    assert listed == {
        str(path.relative_to(tmp_path / "copy")): path.stat().st_size for path in there
    }


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_program_in_the_readme_reads_it_without_growcache(
    filled: Filled, tmp_path: Path
) -> None:
    pytest.importorskip("tensorflow")
    export_cache(filled.root, tmp_path / "copy")
    readme = (tmp_path / "copy" / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nfor s in dataset: print(int(s['id']), s['x'].shape, s['x'].numpy().mean())",
        ],
        cwd=tmp_path / "copy",
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.stdout.splitlines()[11] == "1001 (4,) 1001.0", done.stderr
    assert len(done.stdout.splitlines()) == 40


def test_the_program_casts_and_shapes_every_field() -> None:
    sample = {"a b": np.zeros((2, 0), np.bool_), "z": np.zeros(3, "<f8")}
    code = tfrecord_program(Schema.from_sample(sample))
    assert (
        'tf.reshape(tf.cast(tf.io.decode_raw(found["a b"], tf.uint8), tf.bool), [2, 0])' in code
    )
    assert 'tf.reshape(tf.io.decode_raw(found["z"], tf.float64), [3])' in code


@pytest.mark.parametrize("target", ["tfrecord", "npy"])
@pytest.mark.parametrize("kept", ["tfrecord", "npy"])
@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_kind_of_sample_goes_into_every_format(
    kind: str, kept: str, target: str, tmp_path: Path
) -> None:
    with ragged_cache(tmp_path / "cache", SCHEMAS[kind], kept) as made:
        made.add(0, 3)
    export_cache(tmp_path / "cache", tmp_path / "copy", cache_format=target)
    with Snapshot.take(tmp_path / "cache") as old, Snapshot.take(tmp_path / "copy") as new:
        assert new.view.cache_format == target
        assert [new.origin(i) for i in range(20)] == [old.origin(i) for i in range(20)]
        for i in range(20):
            np.testing.assert_equal(new[i], old[i])
    assert main(["check", str(tmp_path / "copy")]) == 0


def test_the_npy_program_in_the_readme_reads_ragged_samples(tmp_path: Path) -> None:
    with ragged_cache(tmp_path / "cache", SCHEMAS["rows"]) as made:
        made.add(4)
        expected = made.samples(4, 10)
    export_cache(tmp_path / "cache", tmp_path / "copy", cache_format="npy")
    code = (tmp_path / "copy" / "README.md").read_text().split("```python\n")[1]
    program = code.split("```")[0].replace('Path("shards")', f'Path("{tmp_path}/copy/shards")')
    names: dict[str, Any] = {}
    exec(program, names)
    arrays = names["arrays"]
    for i, sample in enumerate(expected):
        start, stop = arrays["x.offsets"][i : i + 2]
        np.testing.assert_array_equal(arrays["x"][start:stop], sample["x"])


def test_a_format_that_is_none(filled: Filled, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected npy or tfrecord, found 'zarr'"):
        export_cache(filled.root, tmp_path / "copy", cache_format="zarr")


def test_an_empty_folder_is_taken_and_any_other_left_alone(
    filled: Filled, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    export_cache(filled.root, tmp_path / "empty")
    assert len(names_in(tmp_path / "empty")) == 40
    with pytest.raises(ConfigError, match="is not empty"):
        export_cache(filled.root, tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        export_cache(filled.root, tmp_path / "file")
    with pytest.raises(ConfigError, match="there is no folder"):
        export_cache(filled.root, tmp_path / "no" / "copy")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_shard_is_not_passed_on(filled: Filled, tmp_path: Path) -> None:
    filled.damage(2)
    with pytest.raises(CorruptShardError, match="1 shard is damaged"):
        export_cache(filled.root, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_midway_leaves_nothing(
    error: BaseException, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def copyfile(source: Path, target: Path) -> None:
        copied.append(source)
        if len(copied) == 3:
            raise error
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises((CacheFullError, KeyboardInterrupt)):
        export_cache(filled.root, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_cache_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CacheMissingError):
        export_cache(tmp_path / "cache", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_a_bar_is_drawn_at_a_terminal_only(filled: Filled, tmp_path: Path) -> None:
    with terminal("export", filled.root, tmp_path / "copy") as seen:
        assert seen.end() == 0
    assert "copying shards" in seen.text
    assert "Copied 40 samples" in seen.text
