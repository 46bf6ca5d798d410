"""Filters of HDF5's plugins, undone without the plugins; slow tests compare with hdf5plugin."""

from __future__ import annotations

import bz2
from collections.abc import Sequence

import numpy as np
import pytest

from growcache.errors import FormatError
from growcache.formats.chunk_codecs import Step, decode_steps
from growcache.formats.hdf5_filters import BZIP2, HDF5_LZ4, bitshuffle_step
from growcache.schema import Array

numcodecs = pytest.importorskip("numcodecs")


def shuffled_bits(values: Array) -> bytes:
    """Return all first bits of some elements, then all second bits, and so on."""
    bits = np.unpackbits(values.view(np.uint8), bitorder="little")
    by_bit = bits.reshape(len(values), -1).T
    return np.packbits(by_bit.reshape(-1), bitorder="little").tobytes()


def shuffled_blocks(values: Array, elements: int) -> tuple[list[bytes], bytes]:
    """Return the blocks, and the rest, which is not shuffled."""
    whole = len(values) // 8 * 8
    starts = range(0, whole, elements)
    blocks = [shuffled_bits(values[at : min(at + elements, whole)]) for at in starts]
    return blocks, values[whole:].tobytes()


def lz4(data: bytes) -> bytes:
    return bytes(numcodecs.LZ4().encode(data))[4:]


def zstd(data: bytes) -> bytes:
    return bytes(numcodecs.Zstd().encode(data))


def framed(blocks: Sequence[bytes], total: int, block: int, rest: bytes = b"") -> bytes:
    sized = [len(one).to_bytes(4, "big") + one for one in blocks]
    return total.to_bytes(8, "big") + block.to_bytes(4, "big") + b"".join(sized) + rest


def undone(step: Step, data: bytes, size: int) -> bytes:
    return bytes(decode_steps(memoryview(data), [step], size))


@pytest.mark.parametrize("dtype", ["|u1", "<i2", "<f4", "<f8", "<c16"])
@pytest.mark.parametrize("count", [5, 64, 203, 1000])
def test_bits_are_put_back(dtype: str, count: int) -> None:
    values = np.random.default_rng(count).integers(0, 200, count).astype(dtype)
    size, item = values.nbytes, values.itemsize
    for elements in (64, 136):
        blocks, rest = shuffled_blocks(values, elements)
        plain = bitshuffle_step((0, 4, item, elements, 0))
        assert undone(plain, b"".join(blocks) + rest, size) == values.tobytes()
        for number, pack in ((2, lz4), (3, zstd)):
            step = bitshuffle_step((0, 4, item, elements, number, 5))
            chunk = framed(list(map(pack, blocks)), size, elements * item, rest)
            assert undone(step, chunk, size) == values.tobytes()


def test_blocks_of_lz4_may_be_stored_as_they_are() -> None:
    data = bytes(range(200)) * 10
    chunk = framed([lz4(data[:900]), data[900:1800], lz4(data[1800:])], 2000, 900)
    assert undone(HDF5_LZ4, chunk, 2000) == data
    assert undone(BZIP2, bz2.compress(data), 2000) == data


SHUFFLED = bitshuffle_step((0, 4, 4, 64, 2))
PACKED = lz4(bytes(256))
HOSTILE: dict[str, tuple[Step, bytes, str]] = {
    "too large": (HDF5_LZ4, framed([PACKED], 1 << 60, 256), "claims 1,152,921"),
    "no blocks": (HDF5_LZ4, framed([PACKED], 256, 0), "blocks of 0"),
    "cut off": (HDF5_LZ4, framed([PACKED], 256, 256)[:-1], "ends beyond"),
    "short": (HDF5_LZ4, framed([lz4(bytes(9))], 256, 256), "cannot be decompressed"),
    "no head": (HDF5_LZ4, b"123", "claims"),
    "many blocks": (SHUFFLED, framed([], 256, 1), "more blocks"),
    "odd blocks": (SHUFFLED, framed([PACKED], 256, 20), "blocks of 5 elements"),
    "rest": (SHUFFLED, framed([PACKED], 256, 256, b"123"), "259 bytes, expected 256"),
    "inflated": (BZIP2, bz2.compress(bytes(5000)), "more than 256"),
    "no bzip2": (BZIP2, b"nonsense", "cannot be decompressed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_chunk_claims_is_bounded(name: str) -> None:
    step, chunk, said = HOSTILE[name]
    with pytest.raises(FormatError, match=said):
        undone(step, chunk, 256)


def test_odd_settings_are_refused() -> None:
    for values in ((0, 4, 0, 64, 2), (0, 4, 4, 64, 9)):
        with pytest.raises(FormatError, match="was not bit-shuffled by"):
            bitshuffle_step(values)
