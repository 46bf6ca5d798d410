"""How much is kept of the metadata of many HDF5 files."""

from __future__ import annotations

from growcache.formats import hdf5_file
from growcache.formats.hdf5_file import METADATA_BLOCK_BYTES, MOST_METADATA_BYTES, HDF5Files
from growcache.store.contract import Entry


class Counted(hdf5_file.MetadataImage):
    """Counts how often somebody asked an image for its size."""

    asked = 0

    @property
    def nbytes(self) -> int:
        Counted.asked += 1
        return super().nbytes


def test_a_new_file_costs_the_same_however_many_are_known(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(hdf5_file, "MetadataImage", Counted)
    files, each = HDF5Files(), 5 * METADATA_BLOCK_BYTES
    known = MOST_METADATA_BYTES // (each + METADATA_BLOCK_BYTES)
    for number in range(2 * known):
        image = files.get(Entry(f"{number}.h5", 1 << 20, "v", None)).image
        image.keep_blocks(0, memoryview(bytes(each)))
        image.keep_blocks(0, memoryview(bytes(each)))  # once more, which takes no more memory
    kept = [n for n in range(2 * known) if Entry(f"{n}.h5", 1 << 20, "v", None) in files._files]
    assert known - 2 <= len(kept) <= known + 1
    assert kept == list(range(kept[0], 2 * known))  # the latest
    assert Counted.asked < 12 * known


def test_files_of_which_nothing_came_are_forgotten_too() -> None:
    files = HDF5Files()
    for number in range(2 * MOST_METADATA_BYTES // METADATA_BLOCK_BYTES):
        files.get(Entry(f"{number}.h5", 1 << 20, "v", None))
    assert len(files._files) <= MOST_METADATA_BYTES // METADATA_BLOCK_BYTES + 1
