"""Hypothesis for this folder: no deadlines, the machine may be busy."""

from hypothesis import settings

settings.register_profile("growcache", deadline=None, max_examples=30)
settings.load_profile("growcache")
