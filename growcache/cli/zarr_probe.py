"""Choose an array from a listing of Zarr stores, the arrays read with it, and how to cut them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from growcache.cli.detect_format import array_path, zarr_url
from growcache.cli.propose_hdf5 import SCALED
from growcache.cli.propose_options import array_options, names_text
from growcache.cli.propose_recordings import Candidate
from growcache.errors import FormatError, ObjectMissingError
from growcache.formats.zarr import open_zarr
from growcache.formats.zarr_metadata import ZarrMetadata
from growcache.humanize import in_bytes
from growcache.store.contract import StoredObject

MAX_CHUNKS_READ = 8  # of an array
MAX_BESIDE = 8  # arrays read with the chosen one
MAX_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FoundArray:
    folder: str  # of the array's chunks
    metadata: ZarrMetadata
    is_scaled: bool  # its attributes have a scale


async def find_array(chunks: Sequence[StoredObject]) -> FoundArray | None:
    """Return the array of the first objects that are chunks."""
    opened = open_zarr({"axis": 0})
    for reader in chunks[:MAX_CHUNKS_READ]:
        if found := await opened.array_of(reader):
            return FoundArray(*found, bool(await opened.advice(reader)))
    return None


async def find_others(chunk_by_path: Mapping[str, StoredObject]) -> dict[str, FoundArray]:
    """Return other readable arrays by path."""
    found = {}
    for path, chunk in list(chunk_by_path.items())[: 2 * MAX_BESIDE]:
        try:
            array = await find_array([chunk])
        except (FormatError, ObjectMissingError):
            continue
        if array is not None:
            found[path] = array
    return found


def zarr_candidate(
    main: FoundArray, others: Mapping[str, FoundArray], url: str, keys: Sequence[str]
) -> tuple[Candidate, str]:
    """Return options for an array, sentences, and the URL of its chunks alone.

    The URL is "" if it would equal the given one.
    """
    metadata = main.metadata
    options, sentence = _cut(metadata)
    scaled = [f"Its {SCALED}"] * main.is_scaled
    options = {**options, **({"scale": "cf"} if main.is_scaled else {})}
    chunks = f"Chunks {list(metadata.chunks)} of {_described(metadata)}"
    path = array_path(main.folder)
    narrower = zarr_url(url, keys, path) if others else ""
    findings = [f"{chunks}{f', array {path}' if path else ''}.", sentence, *scaled]
    if not others:
        return (options, findings), narrower
    along_rows = not options.get("axis") and not isinstance(options.get("window"), list)
    beside = _beside(metadata, path, others) if along_rows else []
    shown = names_text([f"{name} {_described(one.metadata)}" for name, one in others.items()])
    advice = (
        "source.url was set to that of the largest"
        if narrower
        else f"narrow source.url to the chunks of one, such as {main.folder}**"
    )
    findings.append(f"Other arrays: {shown}; {advice}.")
    if beside:
        options = {**options, "beside": beside}
        findings.append("Those of the same length are part of each sample (`beside`).")
    return (options, findings), narrower


def is_anndata(paths: Collection[str]) -> bool:
    """Whether the arrays of a store are cells by genes, as AnnData writes them."""
    has_cells = "X" in paths or {"X/data", "X/indices", "X/indptr"} <= set(paths)
    return has_cells and any(path.startswith("obs/") for path in paths)


def _described(metadata: ZarrMetadata) -> str:
    return f"{metadata.dtype.name}{list(metadata.shape)}"


def _cut(metadata: ZarrMetadata) -> tuple[dict[str, Any], str]:
    shape, chunks = metadata.shape, metadata.chunks
    parts = [size > chunk for size, chunk in zip(shape[1:], chunks[1:], strict=True)]
    if len(shape) > 2 and (shape[0] <= 1 or any(parts)):
        block = block_shape(shape, chunks, metadata.dtype.itemsize)
        size = in_bytes(math.prod(block) * metadata.dtype.itemsize)
        return {"window": block}, f"Blocks {block} of a chunk are samples, {size} each."
    options, sentence = array_options(
        shape, metadata.dtype.itemsize, many=False, chunks=[max(1, n) for n in chunks]
    )
    return (options, sentence) if options else ({"axis": 0}, "Each row is a sample.")


def block_shape(shape: Sequence[int], chunks: Sequence[int], item_bytes: int) -> list[int]:
    """Return a block of at most about 1 MiB that divides a chunk.

    >>> block_shape([1, 2, 8, 900, 900], [1, 1, 1, 256, 256], 2), block_shape([512, 512, 512], [256, 256, 256], 4)
    ([1, 1, 1, 256, 256], [64, 64, 64])
    """
    block = [min(size, chunk) for size, chunk in zip(shape, chunks, strict=True)]
    while math.prod(block) * item_bytes > MAX_BLOCK_BYTES:
        axis = max(range(len(block)), key=lambda axis: block[axis])
        if block[axis] % 2:
            break
        block[axis] //= 2
    return block


def _beside(metadata: ZarrMetadata, path: str, others: Mapping[str, FoundArray]) -> list[str]:
    group = path.rpartition("/")[0]
    along = [
        name.rpartition("/")[2]
        for name, one in others.items()
        if name.rpartition("/")[0] == group and one.metadata.shape[:1] == metadata.shape[:1]
    ]
    return along if len(along) <= MAX_BESIDE else []
