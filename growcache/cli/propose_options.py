"""Propose options for objects of a known format, with sentences that say why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from growcache.cli.detect_format import DTYPES_BY_SUFFIX, suffix_of
from growcache.cli.humanize import in_bytes, in_count
from growcache.formats.image import image_kind
from growcache.store.contract import Entry

MAX_CLASSES = 1000
SMALL_BYTES = 1 << 20  # up to this size an array is one sample, where there are many objects
ROW_BYTES = 4096  # a row of this size can be a sample
SUBARRAY_BYTES = 256  # the same where rows are themselves arrays
WINDOW_BYTES = 1 << 16
MAX_IMAGE_CHANNELS = 4
MIN_IMAGE_SIDE = 16
MAX_NAMED = 8  # arrays, columns or databases
# Options to try, the best first, for formats that need not be looked into.
RECORD_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "tar": [{}, {"decode": "none"}],
    "tfrecord": [{}, {"decode": "none"}],
    "jsonl": [{}, {"raw": True}],
    "nifti": [{}],
    "dicom": [{}],
    "tiff": [{}, {"axis": 0}],
    "edf": [{"window": 1000}],
    "fits": [{}, {"table": 1}],
    "audio": [{"window": 16000}, {"window": 16000, "read": "whole"}, {}],
}

# Options of a format, and sentences about the objects.
Candidate = tuple[dict[str, Any], Sequence[str]]


def candidates(
    form: str, compression: str, entry: Entry, head: bytes, folders: set[str]
) -> list[Candidate]:
    """Return the candidates for objects whose format needs no look inside, the best first.

    ``folders`` are all that hold an image; empty if they are not known.
    """
    options: dict[str, Any]
    if form == "image":
        image = f"A {image_kind(head)} image of {in_bytes(entry.size)}; it stays encoded in the cache."
        options = {"label": "folder"}
        label = "The label is its folder's name; list the names as classes for numbers."
        if "/" not in entry.key or len(folders) == 1:
            options, label = {"label": "none"}, "All are in one folder, so there is no label."
        elif 1 < len(folders) <= MAX_CLASSES:
            options = {"classes": sorted(folders)}
            label = "The label is the number of its folder in classes."
        return [(options, (image, label))]
    if form == "raw":
        dtype = DTYPES_BY_SUFFIX[suffix_of(entry.key)]
        window = window_rows(int(dtype[-1]), entry.size // int(dtype[-1]))
        values = f"A window has {window} values; shape says how many values one row has."
        suffix = f"No header; {dtype} is what the name's ending says."
        return [({"dtype": dtype, "window": window}, (suffix, values))]
    packed = {"compression": compression} if compression else {}
    findings = [f"Compressed by {compression}, so that each object is read whole."] * len(
        packed
    )
    return [({**options, **packed}, findings) for options in RECORD_OPTIONS.get(form, ())]


def names_text(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_NAMED], *(["…"] if len(names) > MAX_NAMED else [])])


def array_options(
    shape: Sequence[int], item_bytes: int, *, many: bool, chunk_rows: int = 0
) -> tuple[dict[str, Any], str]:
    """Return the options that cut samples from an array, and a sentence about them.

    A small array of ``many`` objects is one sample. Windows divide ``chunk_rows``, unless it is 0.
    """
    nbytes = math.prod(shape) * item_bytes
    is_small = many and nbytes <= SMALL_BYTES and len(shape) < 3
    is_image = len(shape) == 3 and sorted(shape)[1] >= MIN_IMAGE_SIDE
    is_image = is_image and min(shape[0], shape[-1]) <= MAX_IMAGE_CHANNELS
    if not shape or shape[0] <= 1 or not nbytes or is_small or is_image:
        return {}, "The whole array is one sample."
    row = nbytes // shape[0]
    if row >= (SUBARRAY_BYTES if len(shape) > 2 else ROW_BYTES):
        each = f"Each of its {in_count(shape[0])} rows {list(shape[1:])} is a sample"
        return {"axis": 0}, f"{each}, read by range; leave axis out to take whole arrays."
    rows = window_rows(row, shape[0])
    if chunk_rows:
        rows = max(n for n in range(1, min(rows, chunk_rows) + 1) if chunk_rows % n == 0)
    each = f"Windows of {rows} rows along the first axis ({in_bytes(rows * row)} each)"
    return {"window": rows}, f"{each}, read by range; a smaller stride lets them overlap."


def window_rows(row_bytes: int, rows: int) -> int:
    """Return the rows of a window of about 64 KiB; an object has at least four windows.

    >>> window_rows(16, 10**9), window_rows(16, 1000), window_rows(3000, 10**6)
    (4096, 128, 16)
    """
    most = min(WINDOW_BYTES // max(1, row_bytes), rows // 4)
    return 1 << max(0, most.bit_length() - 1)
