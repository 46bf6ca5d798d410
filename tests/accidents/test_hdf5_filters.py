"""Every built-in filter of HDF5 yields every window, at any concurrency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import growcache
from tests.accidents.commands import growcache as command
from tests.accidents.commands import status, write_config

h5py = pytest.importorskip("h5py")

ROWS, WIDTH, CHUNK, FILES = 512, 16, 32, 4
FEW_BITS = ["bits", "bits_gzip_sum"]
ENCODERS = {"lzf": "LZF", "szip": "SZIP", "gzip": "DEFLATE"}
STORED: dict[str, dict[str, Any]] = {
    "plain": {},
    "gzip": {"compression": "gzip"},
    "gzip_shuffle_sum": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "lzf_shuffle_sum": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    "szip": {"compression": "szip", "compression_opts": ("nn", 8)},
    "szip_sum": {"compression": "szip", "fletcher32": True},
    "scale": {"scaleoffset": 0},
    "scale_gzip": {"scaleoffset": 0, "compression": "gzip", "shuffle": True},
    "scale_lzf": {"scaleoffset": 0, "compression": "lzf"},
    "scale_of_bits": {"scaleoffset": 12},
}


def write_datasets(path: Path, number: int) -> None:
    """Write a file with one dataset per filter, and some datasets of n-bit numbers."""
    rng = np.random.default_rng(number)
    values = rng.integers(0, 1000, (ROWS, WIDTH)).astype("<i4") + 1000 * number
    values[:, 0] = np.arange(ROWS)
    with h5py.File(path, "w") as file:
        for name, stored in STORED.items():
            if can_encode(stored):
                few = values % 4000 if name == "scale_of_bits" else values
                file.create_dataset(name, data=few, chunks=(CHUNK, WIDTH), **stored)
        noise = rng.random((ROWS, WIDTH))  # incompressible
        for name in ("lzf", "szip"):
            if can_encode(STORED[name]):
                file.create_dataset(
                    f"{name}_noise", data=noise, chunks=(CHUNK, WIDTH), **STORED[name]
                )
        decimals = values.astype("<f8") / 8
        file.create_dataset("decimals", data=decimals, chunks=(CHUNK, WIDTH), scaleoffset=3)
        write_few_bits(file, "bits", values % 2000, h5py.h5t.STD_I16LE, 12)
        write_few_bits(file, "bits_gzip_sum", values, h5py.h5t.STD_U32BE, 21, more=True)


def can_encode(stored: dict[str, Any]) -> bool:
    """Return whether this build of h5py can write with the filter."""
    name = ENCODERS.get(str(stored.get("compression")))
    if name is None:
        return True
    code, h5z = getattr(h5py.h5z, f"FILTER_{name}"), h5py.h5z
    return bool(h5z.filter_avail(code)) and bool(
        h5z.get_filter_info(code) & h5z.FILTER_CONFIG_ENCODE_ENABLED
    )


def write_few_bits(
    file: Any, name: str, values: Any, type_: Any, bits: int, *, more: bool = False
) -> None:
    """Write numbers of `bits` bits through the n-bit filter, as digitizers do."""
    kind = type_.copy()
    kind.set_precision(bits)
    kind.set_offset(3)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((CHUNK, WIDTH))
    plist.set_filter(h5py.h5z.FILTER_NBIT, 0, ())
    if more:
        plist.set_deflate(4)
        plist.set_fletcher32()
    space = h5py.h5s.create_simple(values.shape)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, plist)
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(values))


@pytest.mark.parametrize("window", [CHUNK, pytest.param(20, marks=pytest.mark.slow)])
def test_every_filter_yields_every_window_as_h5py_reads_it(tmp_path: Path, window: int) -> None:
    for number in range(FILES):
        write_datasets(tmp_path / f"{number}.h5", number)
    with h5py.File(tmp_path / "0.h5") as file:
        names = [name for name in file if name not in FEW_BITS]
    assert_all_is_read(tmp_path, names, window)


@pytest.mark.slow
def test_numbers_of_few_bits_are_read_as_h5py_reads_them(tmp_path: Path) -> None:
    for number in range(FILES):
        write_datasets(tmp_path / f"{number}.h5", number)
    assert_all_is_read(tmp_path, FEW_BITS, CHUNK)


def assert_all_is_read(folder: Path, names: list[str], window: int) -> None:
    config = write_config(
        folder / "cache.yaml",
        {
            "url": f"{folder}/*.h5",
            "format": "hdf5",
            "options": {"datasets": names, "window": window},
        },
        sampling={"concurrency": 32, "samples_per_object": 1, "max_skipped": 1.0},
        cache={"max_bytes": "60MB", "min_uses": 0},
    )
    done = command("run", config, "--until-full", seconds=120)
    assert done.returncode == 0, done.stderr
    found = status(folder / "cache")
    assert (found["holes"], found["samples"]) == (0, FILES * (ROWS // window)), done.stderr
    with growcache.Snapshot.take(folder / "cache") as snapshot:
        for i in range(len(snapshot)):
            assert_as_h5py_reads(snapshot[i], snapshot.origin(i), folder, names)


def assert_as_h5py_reads(sample: Any, origin: Any, folder: Path, names: list[str]) -> None:
    with h5py.File(folder / Path(origin.key).name) as file:
        for name in names:
            expected = file[name][origin.start : origin.stop]
            np.testing.assert_array_equal(sample[name], expected, err_msg=name)
