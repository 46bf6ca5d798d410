"""NumPy's front door: no framework is imported, and rows of any kind are copied."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.loading.framework import take_rows
from growcache.numpy import EpochLoader
from tests.filled import Filled
from tests.loading.conftest import full_of


@pytest.fixture
def cache(tmp_path: Any) -> Any:
    filled = Filled(tmp_path / "cache", full_of((4,)))
    yield filled
    filled.close()


def test_batches_are_arrays_of_the_schema(cache: Filled) -> None:
    cache.add(0, 1, 2, 3)
    seen: list[int] = []
    with EpochLoader(cache.root, batch_size=8, min_samples=1) as loader:
        for batch in loader:
            assert list(batch) == ["id", "x"]
            assert (batch["id"].shape, batch["id"].dtype) == ((8,), np.int64)
            assert (batch["x"].shape, batch["x"].dtype) == ((8, 4), np.float32)
            np.testing.assert_array_equal(batch["x"][:, 3], batch["id"])
            batch["x"] += 1  # batches belong to the user
            seen += batch["id"].tolist()
    assert len(seen) == len(set(seen)) == 40


def test_no_framework_is_imported(cache: Filled) -> None:
    cache.add(0, 1)
    program = (
        "import sys\n"
        "from growcache.numpy import EpochLoader\n"
        f"loader = EpochLoader({str(cache.root)!r}, batch_size=8, min_samples=1)\n"
        "print(sum(len(b['id']) for b in loader))\n"
        "assert not {'torch', 'tensorflow', 'jax'} & set(sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "16\n", "")


def test_a_loader_pickles_as_its_arguments(cache: Filled) -> None:
    cache.add(0, 1, 2, 3)
    options: Any = {"batch_size": 8, "min_samples": 1, "seed": 5, "fields": ["id"]}
    with EpochLoader(cache.root, **options) as first:
        expected = [batch["id"].tolist() for batch in first]
        data = pickle.dumps(first)
    assert len(data) < 1000
    with pickle.loads(data) as again:
        assert [batch["id"].tolist() for batch in again] == expected


@pytest.mark.parametrize("nbytes", [1, 300, 16_383, 16_384, 262_144])
def test_rows_are_copied_from_anywhere(nbytes: int) -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, 5 * nbytes + 41, np.uint8)
    starts = np.append(rng.integers(0, 4 * nbytes + 41, 6), 4 * nbytes + 41)
    out: Any = np.zeros((7, nbytes), np.uint8)
    take_rows(memory, starts, out)
    np.testing.assert_array_equal(out, [memory[s : s + nbytes] for s in starts.tolist()])
    for bad in (4 * nbytes + 42, -1):
        with pytest.raises(IndexError):
            take_rows(memory, np.array([bad]), out[:1])


JAX = """
import sys
import jax
import numpy as np
from growcache.numpy import EpochLoader

kept, shared = [], 0
with EpochLoader(sys.argv[1], batch_size=8, min_samples=1) as loader:
    for _ in range(10):
        for step, batch in enumerate(loader):
            array = jax.device_put(batch["x"])  # without a copy, where JAX finds a way
            if step % 2:  # the memory of the others is used again
                address = batch["x"].__array_interface__["data"][0]
                shared += array.unsafe_buffer_pointer() == address
                kept.append((array, batch["x"].copy()))
assert shared, "nothing is shared, so this proves nothing"
assert all(np.array_equal(array, expected) for array, expected in kept)
print(len(kept))
"""


def test_jax_may_keep_what_it_took_without_a_copy(tmp_path: Path) -> None:
    with Filled(tmp_path, full_of((8192,))) as cache:  # batches large enough to be recycled
        cache.add(*range(8))
        done = subprocess.run(
            [sys.executable, "-c", JAX, tmp_path], capture_output=True, text=True, timeout=300
        )
    assert (done.returncode, done.stdout) == (0, "50\n"), done.stderr
