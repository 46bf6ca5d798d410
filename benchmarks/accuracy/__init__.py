"""Whether a bounded, growing, evicting cache makes a model worse, and what it saves.

Experiments on real data at equal steps: `python -m benchmarks.accuracy [NAME …]`. Their claims and
margins were written before their results: margins.md.
"""
