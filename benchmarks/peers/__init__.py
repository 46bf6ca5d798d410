"""growcache compared with other ways of feeding a training loop from a local disk.

`python -m benchmarks.peers` installs them (`environments.py`), has each write the same
samples in its own format, and runs all of them in turns. `cases.py` says which samples,
`roster.py` who takes part and in which settings; `contestants/` has a module for each, which
runs in a process (`child.py`) of the contestant's own environment. So what a child imports
needs nothing but NumPy: `cases.py`, `proof.py`, `loops.py`, `cost.py`, `../noise.py`.
`results.py` takes the medians, `goals.py` judges, `page.py` and `picture.py` write
docs/reference/loader_benchmarks.md.
"""
