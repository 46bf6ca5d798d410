"""A cache must let no one read, write, run or learn more than it should; see docs/reference/reliability.md."""
