"""What nobody may read, write, run or learn through a cache; see docs/reliability.md."""
