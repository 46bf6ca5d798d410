"""Cache formats: samples to shard files and back, one module per format.

A format is a module with ``EXTENSION``, ``layout``, ``encode``, ``open_shard`` and
``bad_records``; adding one is a file and a line here.
"""

from __future__ import annotations

from types import ModuleType

from growcache.cache.formats import tfrecord

CACHE_FORMATS: dict[str, ModuleType] = {"tfrecord": tfrecord}
