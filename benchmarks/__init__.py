"""Programs that measure the figures in the README; see docs/development.md."""
