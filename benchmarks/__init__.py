"""Programs that measure the figures in the README; see docs/contributing/index.md."""
