"""From the cache to batches: snapshots, plans, gathering, epochs."""
