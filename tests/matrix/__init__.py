"""Writer, option, result: what real libraries write, growcache reads as the same libraries do.

Each module named ``cases_*.py`` has a list ``CASES`` for one family of files. A case writes a few small
files with a library, says how the source is configured, and reads the sample of an origin with the
library. `tests.matrix.test_matrix` runs the service of every case and compares every cached sample,
value by value and dtype by dtype. ``python -m tests.matrix`` writes the table of docs/reference/matrix.md.
"""
