"""The bounded, evicting directory of shards and its index."""
