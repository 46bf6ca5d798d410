"""Jobs over several nodes, each with a cache of its own."""
