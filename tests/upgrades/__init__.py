"""Caches of earlier versions of growcache, and the script that makes them.

``python -m tests.upgrades COMMIT`` fills the caches of `CONFIGS` with the growcache of that commit, and keeps them in
``caches/``. Their objects are made again wherever a test needs them.
"""
