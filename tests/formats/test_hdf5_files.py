"""How much is kept of the metadata of many HDF5 files."""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest

from growcache.errors import FormatError
from growcache.formats.hdf5_file import METADATA_BLOCK_BYTES, MOST_METADATA_BYTES, HDF5Files
from growcache.store.contract import Entry
from tests.formats.held import Held

NOT_HDF5 = np.zeros(1 << 16, "u1")


@pytest.mark.slow
def test_the_metadata_of_many_files_is_bounded() -> None:
    files = HDF5Files()

    async def ask(key: str) -> Held:
        held = Held(bytes(NOT_HDF5), key)
        with pytest.raises(FormatError, match="cannot be read as HDF5"):
            await files.get(held.entry).call(held, lambda file: file)
        return held

    async def ask_all(count: int) -> None:
        for number in range(count):
            assert (await ask(f"{number}.h5")).asked
        assert not (await ask(f"{count - 1}.h5")).asked  # the latest are known
        assert (await ask("0.h5")).asked

    known = MOST_METADATA_BYTES // NOT_HDF5.nbytes
    tracemalloc.start()
    asyncio.run(ask_all(known + known // 4))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert MOST_METADATA_BYTES // 2 < kept < MOST_METADATA_BYTES * 5 // 4
    assert len(files) <= known


def test_files_of_which_nothing_came_are_forgotten_too() -> None:
    files = HDF5Files()
    for number in range(2 * MOST_METADATA_BYTES // METADATA_BLOCK_BYTES):
        files.get(Entry(f"{number}.h5", 1 << 20, "v", None))
    assert len(files) <= MOST_METADATA_BYTES // METADATA_BLOCK_BYTES + 1
