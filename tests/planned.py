"""The windows of a pass over shards of given sizes."""

from __future__ import annotations

from collections.abc import Iterable

from growcache.loading.plan import Window, cut_windows, shard_order


def plan_pass(
    shards: Iterable[tuple[int, int]],
    *,
    seed: int,
    pass_number: int,
    target_samples: int,
    shuffle: bool = True,
) -> tuple[Window, ...]:
    order = shard_order(shards, seed=seed, pass_number=pass_number, shuffle=shuffle)
    return cut_windows(
        order,
        seed=seed,
        pass_number=pass_number,
        target_samples=target_samples,
        shuffle=shuffle,
    )
