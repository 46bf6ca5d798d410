"""From a permit to a shard on disk: drawing, filling, supervising."""
