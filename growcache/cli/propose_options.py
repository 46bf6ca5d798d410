"""Propose options for objects of a known format, with sentences about the reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growcache.cli.detect_format import DTYPES_BY_SUFFIX, suffix_of
from growcache.cli.guess_dtype import RAW_SUFFIXES, guess_dtype
from growcache.cli.propose_recordings import (
    Candidate,
    audio_candidates,
    edf_candidates,
    nifti_candidates,
)
from growcache.formats.compressed import compression_by_name
from growcache.formats.image import image_kind
from growcache.humanize import in_bytes, in_count
from growcache.store.contract import Entry

MAX_CLASSES = 1000
SMALL_BYTES = 1 << 20  # if there are many objects, an array up to this size is one sample
ROW_BYTES = 4096  # a row of this size can be a sample
SUBARRAY_BYTES = 256  # the same if rows are themselves arrays
WINDOW_BYTES = 1 << 16
MAX_IMAGE_CHANNELS = 4
MIN_IMAGE_SIDE = 16
MAX_NAMED = 8  # arrays, columns or databases
# An axis of time has at least this many values, and this many times as many as the channels.
MIN_TIMES, MIN_TIME_RATIO, MAX_CHANNELS = 10_000, 16, 512
DTYPE_NAMES = {
    "|u1": "unsigned bytes",
    **{
        f"{order}{kind}": f"{name}, {end}-endian"
        for order, end in (("<", "little"), (">", "big"))
        for kind, name in (
            ("i2", "int16"),
            ("i4", "int32"),
            ("f4", "float32"),
            ("f8", "float64"),
        )
    },
}
RECORD_OPTIONS: dict[str, list[Candidate]] = {
    "tar": [
        ({}, ("Members whose names are equal up to the first dot form a sample.",)),
        ({"decode": "none"}, ("Members stay bytes.",)),
    ],
    "tfrecord": [
        ({}, ("Each record is a sample.",)),
        ({"decode": "none"}, ("Each record is a sample, as bytes.",)),
    ],
    "jsonl": [
        ({}, ("Each line is a sample.",)),
        ({"raw": True}, ("Each line is a sample, as bytes.",)),
    ],
    "dicom": [
        (
            {},
            ("The stored pixels are a sample; values: rescaled gives Hounsfield units in CT.",),
        )
    ],
    "tiff": [
        ({}, ("The whole image is one sample; window: [256, 256] cuts blocks.",)),
        ({"axis": 0}, ("Each page is a sample.",)),
    ],
    "fits": [
        ({}, ("The first image is one sample; window: [64, 64] cuts blocks.",)),
        ({"table": 1}, ("Each row of the first table is a sample.",)),
    ],
}


def candidates(
    form: str, compression: str, entry: Entry, head: bytes, folders: set[str]
) -> list[Candidate]:
    """Return the candidates for objects whose header need not be read, best first.

    ``folders`` are all folders that contain images, or empty if unknown.
    """
    if form == "image":
        return [_image_candidate(entry, head, folders)]
    if form == "raw":
        return [_raw_candidate(DTYPES_BY_SUFFIX[suffix_of(entry.key)], entry)]
    found = _MEASURED[form](head) if form in _MEASURED else RECORD_OPTIONS.get(form, ())
    is_named = compression_by_name(entry.key) == compression
    packed = {"compression": compression} if compression and not is_named else {}
    whole = (
        [f"Compressed by {compression}, so each object is read whole."] if compression else []
    )
    return [({**options, **packed}, [*whole, *findings]) for options, findings in found]


def _image_candidate(entry: Entry, head: bytes, folders: set[str]) -> Candidate:
    image = (
        f"A {image_kind(head)} image of {in_bytes(entry.size)}; it stays encoded in the cache."
    )
    options: dict[str, Any] = {"label": "folder"}
    label = "The label is its folder's name; classes: auto turns the names into numbers."
    if "/" not in entry.key or len(folders) == 1:
        options, label = {"label": "none"}, "All are in one folder, so there is no label."
    elif 1 < len(folders) <= MAX_CLASSES:
        options = {"classes": sorted(folders)}
        label = "The label is the number of its folder in classes."
    return options, (image, label)


def _raw_candidate(dtype: str, entry: Entry) -> Candidate:
    options = raw_options(dtype, entry.size)
    named = f"No header is expected; the ending of the name says {dtype}."
    return options, (named, _raw_sentence(options))


def raw_options(dtype: str, nbytes: int, channels: int = 1) -> dict[str, Any]:
    """Return options for rows of numbers without a header.

    >>> raw_options("<i2", 1 << 30, 64)
    {'dtype': '<i2', 'shape': [64], 'window': 512}
    """
    digits = dtype.lstrip("<>|=")[1:]
    row = (int(digits) if digits.isdigit() else 8) * max(1, channels)
    shape = {"shape": [channels]} if channels > 1 else {}
    return {"dtype": dtype, **shape, "window": window_rows(row, nbytes // row)}


def _raw_sentence(options: Mapping[str, Any]) -> str:
    rows = f"Windows of {options['window']} rows"
    return f"{rows}; shape: [64] means that a row has 64 values, such as channels."


def guessed_raw(entry: Entry, head: bytes) -> Candidate | None:
    """Return a candidate for numbers without a header, if the name does not show their dtype."""
    if suffix_of(entry.key) not in RAW_SUFFIXES:
        return None
    dtype = guess_dtype(head)
    if not dtype:
        return None
    options = raw_options(dtype, entry.size)
    guess = f"A guess: the bytes look like {DTYPE_NAMES[dtype]}. No header is expected; offset skips one."
    return options, (guess, _raw_sentence(options))


_MEASURED: dict[str, Callable[[bytes], list[Candidate]]] = {
    "audio": audio_candidates,
    "edf": edf_candidates,
    "nifti": nifti_candidates,
}


def names_text(names: Sequence[str]) -> str:
    return ", ".join([*names[:MAX_NAMED], *(["…"] if len(names) > MAX_NAMED else [])])


def array_options(
    shape: Sequence[int], item_bytes: int, *, many: bool, chunks: Sequence[int] = ()
) -> tuple[dict[str, Any], str]:
    """Return the options that cut samples from an array, and a sentence about them.

    A small array is one sample if there are ``many`` objects. Windows divide ``chunks``, if
    there are any.
    """
    nbytes = math.prod(shape) * item_bytes
    is_small = many and nbytes <= SMALL_BYTES and len(shape) < 3
    is_image = len(shape) == 3 and sorted(shape)[1] >= MIN_IMAGE_SIDE
    is_image = is_image and min(shape[0], shape[-1]) <= MAX_IMAGE_CHANNELS
    if not shape or not nbytes or is_small or is_image:
        return {}, "The whole array is one sample."
    axis = long_axis(shape)
    if shape[axis] <= 1:
        return {}, "The whole array is one sample."
    row = nbytes // shape[axis]
    if not axis and row >= (SUBARRAY_BYTES if len(shape) > 2 else ROW_BYTES):
        each = f"Each of its {in_count(shape[0])} rows {list(shape[1:])} is a sample"
        if len(shape) == 2 and shape[1] > shape[0]:
            other = "if the other axis is time, set axis: 1 and a window"
            return {"axis": 0}, f"{each}, read by range; {other}."
        return {"axis": 0}, f"{each}, read by range; leave axis out to take whole arrays."
    rows = window_rows(row, shape[axis])
    if chunks:
        chunk = min(chunks[axis], shape[axis])
        rows = max(n for n in range(1, min(rows, chunk) + 1) if chunk % n == 0)
    size = in_bytes(rows * row)
    if axis:
        along = f"Axis {axis} is much longer than the others, so it is taken for time"
        each = f"windows of {rows} along it ({size} each)"
        return {"axis": axis, "window": rows}, f"{along}: {each}, read by range."
    each = f"Windows of {rows} rows along the first axis ({size} each)"
    return {"window": rows}, f"{each}, read by range; a smaller stride lets them overlap."


def long_axis(shape: Sequence[int]) -> int:
    """Return an axis that is much longer than all others, as of time, or 0.

    >>> long_axis([64, 100_000]), long_axis([100_000, 64]), long_axis([60_000, 784]), long_axis([3, 4, 50_000])
    (1, 0, 0, 2)
    """
    longest = max(range(len(shape)), key=lambda axis: shape[axis])
    others = math.prod(shape) // max(1, shape[longest])
    is_time = shape[longest] >= MIN_TIMES and others <= MAX_CHANNELS
    return longest if is_time and shape[longest] >= MIN_TIME_RATIO * others else 0


def window_rows(row_bytes: int, rows: int) -> int:
    """Return the rows of a window of about 64 KiB, with at least four windows per object.

    >>> window_rows(16, 10**9), window_rows(16, 1000), window_rows(3000, 10**6)
    (4096, 128, 16)
    """
    most = min(WINDOW_BYTES // max(1, row_bytes), rows // 4)
    return 1 << max(0, most.bit_length() - 1)
