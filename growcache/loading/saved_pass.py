"""A pass in a state: a few kilobytes if the numbers and sizes of its shards are regular. Pure.

Numbers are stored as gaps, and numbers and sizes compress well if they are regular. The order
of the shards follows from the seed, unless some have substitutes. Digests do not compress. So
only the next shards have theirs, and all later ones share one digest. Delivered shards need
none.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from growcache.loading.framework import Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import (
    DIGEST_CHARACTERS,
    PassPlan,
    PassPosition,
    PlannedShard,
    RestDigest,
    visit_order,
)

NAMED_SHARDS = 256  # with their own digest; at least those of the current window
NAME_BYTES = 6  # of each of these digests
MOST_BYTES = 1 << 28  # of numbers in a valid state


def pass_to_dict(
    plan: PassPlan | None, mark: PassPosition | None, options: LoaderOptions
) -> dict[str, Any] | None:
    if plan is None or mark is None:
        return None
    shards = plan.shards
    numbers = np.array([shard.number for shard in shards], np.int64)
    places = np.argsort(numbers)
    first, end = _named(plan, mark)
    rest = plan.rest or RestDigest(end, rest_digest(shards[end:]))
    samples = np.array([shard.samples for shard in shards], np.int64)[places]
    return {
        "number": plan.number,
        "position": mark.position,
        "corrupt": list(mark.corrupt),
        "window_samples": plan.window_samples,
        "first_shard": int(numbers.min()) if len(numbers) else 0,
        "gaps": pack_numbers(np.diff(numbers[places])),
        "samples": pack_numbers(samples),
        "order": _order(places, plan, options),
        "named": first,
        "digests": _pack_digests(shards[first : rest.first]),
        "rest_digest": rest.digest,
    }


def pass_from_dict(
    values: Mapping[str, Any], options: LoaderOptions
) -> tuple[PassPlan, PassPosition]:
    """Return plan and position of a pass in a state.

    Raises ValueError, or another error of broken values, for anything else.
    """
    samples = unpack_numbers(values["samples"])
    gaps = unpack_numbers(values["gaps"])
    if len(gaps) != max(0, len(samples) - 1):
        raise ValueError(f"{len(samples)} shards, but {len(gaps)} gaps of numbers")
    numbers = np.cumsum([int(values["first_shard"]), *gaps.tolist()])[: len(samples)]
    pass_number = int(values["number"])
    if values["order"] is None:
        order = _seeded_order(len(samples), pass_number, options)
    else:
        order = unpack_numbers(values["order"])
    if sorted(order.tolist()) != list(range(len(samples))):
        raise ValueError("the order of the shards is not valid")
    first, digests = int(values["named"]), _unpack_digests(values["digests"])
    end = first + len(digests)
    if not 0 <= first <= end <= len(samples):
        raise ValueError(f"digests of the shards {first} to {end} of {len(samples)}")
    named = [""] * first + digests + [""] * (len(samples) - end)
    shards = map(PlannedShard, numbers[order].tolist(), samples[order].tolist(), named)
    rest = RestDigest(end, str(values["rest_digest"]))
    return _checked_pass(
        PassPlan(pass_number, tuple(shards), int(values["window_samples"]), rest), values
    )


def pass_of_version_2(values: Mapping[str, Any]) -> tuple[PassPlan, PassPosition]:
    """Read a pass from an earlier state, in which each shard has its digest."""
    numbers, samples, joined = values["numbers"], values["samples"], values["digests"]
    if len(joined) != DIGEST_CHARACTERS * len(numbers):
        raise ValueError(f"{len(numbers)} shards, but digests of {len(joined)} characters")
    starts = range(0, len(joined), DIGEST_CHARACTERS)
    digests = [joined[i : i + DIGEST_CHARACTERS] for i in starts]
    shards = tuple(map(PlannedShard, map(int, numbers), map(int, samples), digests))
    if len(shards) != len(samples):
        raise ValueError(f"{len(numbers)} shards, but {len(samples)} numbers of samples")
    plan = PassPlan(int(values["number"]), shards, int(values["window_samples"]))
    return _checked_pass(plan, values)


def _checked_pass(plan: PassPlan, values: Mapping[str, Any]) -> tuple[PassPlan, PassPosition]:
    corrupt = tuple(map(int, values["corrupt"]))
    mark = PassPosition(plan.number, int(values["position"]), corrupt)
    if not 0 <= mark.position <= len(plan):
        raise ValueError(f"position {mark.position} of {len(plan)} samples")
    return plan, mark


def rest_digest(shards: Sequence[PlannedShard]) -> str:
    """Return one digest of these shards' digests, or "" if one of them is unknown."""
    if not all(shard.is_named for shard in shards) or not shards:
        return ""
    joined = "".join([shard.digest for shard in shards])
    return hashlib.blake2b(joined.encode(), digest_size=DIGEST_CHARACTERS // 2).hexdigest()


def _named(plan: PassPlan, mark: PassPosition) -> tuple[int, int]:
    """Return the first shard of the current window, and the first without its own digest."""
    ends = list(accumulate((shard.samples for shard in plan.shards), initial=0))
    for start, stop in plan.window_edges():
        if mark.position < ends[stop]:
            return start, min(len(plan.shards), max(stop, start + NAMED_SHARDS))
    return len(plan.shards), len(plan.shards)


def _order(places: Integers, plan: PassPlan, options: LoaderOptions) -> str | None:
    """Return the visiting order of the sorted shards, or None if the seed implies it."""
    ranks = np.empty_like(places)
    ranks[places] = np.arange(len(places))
    if (ranks == _seeded_order(len(places), plan.number, options)).all():
        return None
    return pack_numbers(ranks)


def _seeded_order(count: int, pass_number: int, options: LoaderOptions) -> Integers:
    return visit_order(
        count, seed=options.seed, pass_number=pass_number, shuffle=options.is_shuffled
    )


def _pack_digests(shards: Sequence[PlannedShard]) -> str:
    names = "".join(
        [shard.digest[: 2 * NAME_BYTES].ljust(2 * NAME_BYTES, "0") for shard in shards]
    )
    return base64.b64encode(bytes.fromhex(names)).decode()


def _unpack_digests(text: str) -> list[str]:
    names = base64.b64decode(text, validate=True).hex()
    width = 2 * NAME_BYTES
    if len(names) % width:
        raise ValueError(f"digests of {len(names) // 2} bytes")
    found = [names[at : at + width] for at in range(0, len(names), width)]
    return ["" if name == "0" * width else name for name in found]


def pack_numbers(numbers: npt.NDArray[np.int64]) -> str:
    """Return numbers from 0 on in about as many bytes as their differences need.

    >>> unpack_numbers(pack_numbers(np.array([1, 2, 300]))).tolist()
    [1, 2, 300]
    >>> len(pack_numbers(np.full(100_000, 1000))) < 400
    True
    """
    most = int(numbers.max(initial=0))
    width = next(width for width in (1, 2, 4, 8) if most < 1 << (8 * width))
    # All lowest bytes, then all next ones, so that zeros and repetitions are adjacent.
    planes = numbers.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()
    return f"{width}{base64.b64encode(zlib.compress(planes)).decode()}"


def unpack_numbers(text: str) -> npt.NDArray[np.int64]:
    width = int(text[:1])
    packed = base64.b64decode(text[1:], validate=True)
    planes = zlib.decompressobj().decompress(packed, MOST_BYTES)
    if width not in (1, 2, 4, 8) or len(planes) % width:
        raise ValueError(f"numbers of {width} bytes, {len(planes)} bytes in all")
    columns = np.frombuffer(planes, np.uint8).reshape(width, -1).T
    return np.ascontiguousarray(columns).view(f"<u{width}").ravel().astype(np.int64)
