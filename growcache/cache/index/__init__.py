"""The SQLite index of a cache: which shards are live."""
