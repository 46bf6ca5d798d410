"""The SQLite index of a cache, which has the live shards."""
