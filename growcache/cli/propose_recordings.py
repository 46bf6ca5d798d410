"""Propose options for recordings and scans from their headers: rates, signals, shapes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from growcache.formats.compressed import unpacked_start
from growcache.humanize import plural

# Options of a format, and sentences about the objects.
Candidate = tuple[dict[str, Any], Sequence[str]]
EDF_WINDOW = "2s"
MAX_RATE = 1_000_000  # frames per second of plausible audio


def nifti_candidates(head: bytes) -> list[Candidate]:
    shape = nifti_shape(unpacked_start(head, "gzip") if head[:2] == b"\x1f\x8b" else head)
    volume: Candidate = (
        {},
        ("The whole volume is one sample; window: [64, 64, 64] cuts blocks.",),
    )
    if len(shape) == 4 and shape[3] > 1:
        series = f"A series of {shape[3]} volumes {list(shape[:3])}, each of which is a sample."
        return [({"axis": 3}, (series,)), volume]
    return [volume]


def nifti_shape(head: bytes) -> tuple[int, ...]:
    """Return the shape of a volume from its header, or () if it is damaged."""
    for order in "<>":
        for start, sizes in ((40, f"{order}8h"), (16, f"{order}8q")):  # NIfTI-1, NIfTI-2
            if len(head) < 348:
                return ()
            count, *shape = struct.unpack_from(sizes, head, start)
            if 1 <= count <= 7 and min(shape[:count]) > 0:
                return tuple(shape[:count])
    return ()


def edf_candidates(head: bytes) -> list[Candidate]:
    rates = labels_by_rate(head)
    options: dict[str, Any] = {"window": EDF_WINDOW}
    if not rates:
        return [(options, ())]
    rate = max(rates, key=lambda rate: len(rates[rate]))
    others = sum(map(len, rates.values())) - len(rates[rate])
    count = plural(len(rates[rate]), "signal")
    windows = f"Windows of {EDF_WINDOW[:-1]} s of {count} at {rate:g} Hz, in physical units."
    if not others:
        return [(options, (windows,))]
    named = (
        f"{plural(others, 'signal has', 'signals have')} another rate, so channels names these."
    )
    channels = list(dict.fromkeys(filter(None, rates[rate])))
    return [({"channels": channels, **options}, (windows, named))]


def labels_by_rate(head: bytes) -> dict[float, list[str]]:
    """Return the labels of an EDF or BDF header by sampling rate, without annotations.

    It is empty if the header is damaged.
    """
    try:
        count, seconds = int(head[252:256]), float(head[244:252])
        labels = [head[256 + 16 * n :][:16].decode("latin-1").strip() for n in range(count)]
        counts = [int(head[256 + 216 * count + 8 * n :][:8]) for n in range(count)]
        rates = [number / seconds for number in counts]
    except (ValueError, ZeroDivisionError):
        return {}
    found: dict[float, list[str]] = {}
    for label, rate in zip(labels, rates, strict=True):
        if not label.endswith("Annotations"):
            found.setdefault(rate, []).append(label)
    return found


def audio_candidates(head: bytes) -> list[Candidate]:
    rate = rate_of_audio(head)
    whole: Candidate = ({}, ("Each object is a sample; window cuts it.",))
    if not rate:
        options: dict[str, Any] = {"window": 16000}
        second = "Windows of 16000 frames; window: 1s needs rate, the frames per second."
    else:
        options = {"window": "1s", "rate": rate}
        second = f"Windows of one second at {rate} Hz; objects of another rate are refused."
    return [
        (options, (second,)),
        ({**options, "read": "whole"}, (f"{second} Each object is decoded as a whole.",)),
        whole,
    ]


def rate_of_audio(head: bytes) -> int:
    """Return the frames per second of a WAV or FLAC file, or 0 if unknown."""
    if head.startswith(b"fLaC"):
        return int.from_bytes(head[18:21], "big") >> 4
    at = head.find(b"fmt ", 12, 4096)
    rate = int.from_bytes(head[at + 12 : at + 16], "little") if at > 0 else 0
    return rate if rate <= MAX_RATE else 0
