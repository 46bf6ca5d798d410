"""From a permit to a shard on disk: draw, fill, supervise."""
