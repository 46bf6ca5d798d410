"""From the cache to batches: snapshots, plans, gathering, and the channel to the training loop."""
