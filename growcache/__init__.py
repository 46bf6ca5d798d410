"""growcache: a bounded local cache of random samples that grows while you train."""
