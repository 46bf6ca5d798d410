"""Programs that measure the figures of the README; see docs/development.md."""
