"""The use of a Ray cluster's object stores while a block runs."""

from __future__ import annotations

import threading

from tests.sampling.ray_clusters import RayCluster


class StoreWatch(threading.Thread):
    """Looks at the stores of all nodes again and again while a block runs."""

    def __init__(self, cluster: RayCluster, every_seconds: float = 0.5) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._every = every_seconds
        self._ended = threading.Event()
        self._spilled: dict[str, int] = {}  # by node
        self._spilled_before = 0
        self.most_used_bytes = 0  # in all stores
        self.most_used_bytes_of_a_node = 0
        self.most_pinned_bytes_of_a_node = 0
        self.looks = 0

    @property
    def spilled_bytes(self) -> int:
        """Bytes that were spilled meanwhile, also by nodes that are gone."""
        return sum(self._spilled.values()) - self._spilled_before

    def __enter__(self) -> StoreWatch:
        self._look()
        self._spilled_before = sum(self._spilled.values())
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        self._look()

    def run(self) -> None:
        """See `threading.Thread`."""
        while not self._ended.wait(self._every):
            self._look()

    def _look(self) -> None:
        stores = self._cluster.store_use()
        used = [store.used_bytes for store in stores.values()]
        pinned = [store.pinned_bytes for store in stores.values()]
        self.most_used_bytes = max(self.most_used_bytes, sum(used))
        self.most_used_bytes_of_a_node = max(self.most_used_bytes_of_a_node, *used)
        self.most_pinned_bytes_of_a_node = max(self.most_pinned_bytes_of_a_node, *pinned)
        self._spilled |= {node: store.spilled_bytes for node, store in stores.items()}
        self.looks += 1
