"""The objects that a sample was put together from, beside the one that its shard tells of."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from growcache.cache.files import Layout
from growcache.errors import ObjectMissingError
from growcache.remote.catalog import Catalog
from growcache.remote.store import Entry, RemoteStore, StoreReader
from growcache.remote.templates import Template

GONE = "{} is not in the store any more"
CHANGED = "{} was rewritten since it was sampled"


class PartnerError(Exception):
    """An object of another field is not what it was.

    Args:
        verdict: in a word.
        why: in words.
    """

    def __init__(self, verdict: str, why: str) -> None:
        super().__init__(verdict, why)
        self.verdict, self.why = verdict, why


async def partners_of(root: Path, reader: StoreReader, first: int) -> tuple[Entry, ...]:
    """Return the objects of the other fields: a shard tells of the first, the listing of all.

    Args:
        root: of the cache.
        reader: of the first field's object.
        first: the number of its source's first URL among those of all sources.

    Raises:
        PartnerError: one is not what it was when it was listed.
    """
    store = reader.store
    assert isinstance(store, RemoteStore)
    templates = [Template.of(field.url) for field in store.source.fields.values()]
    values = templates[0].values(reader.entry.key) if templates else None
    if values is None:
        return ()
    others = [(n, other.rendered(values)) for n, other in enumerate(templates[1:], 1)]
    listed = _listed_as(root, {(first + n, store.key_beside(n, below)) for n, below in others})
    ours = {n: replace(entry, store=n - first) for (n, _), entry in listed.items()}
    return tuple([await _partner(store, ours.get(first + n), n, below) for n, below in others])


async def _partner(store: RemoteStore, then: Entry | None, n: int, below: str) -> Entry:
    """Return an object of another field as it was listed; where nobody knows, as it is now."""
    key = store.key_beside(n, below)
    try:
        now = await store.beside(n, below)
    except ObjectMissingError:
        raise PartnerError("gone", GONE.format(key)) from None
    then = then or now
    # The time counts where it is all there is: listings and single answers round it differently.
    told = None not in (then.etag, now.etag)
    versions = (then.etag, now.etag) if told else (then.mtime, now.mtime)
    same = None in versions or versions[0] == versions[1]
    if then.size != now.size or not same:
        raise PartnerError("changed", CHANGED.format(key))
    return then


def _listed_as(root: Path, wanted: Set[tuple[int, str]]) -> dict[tuple[int, str], Entry]:
    """Return what the cache's listing says of objects; an exported cache has none.

    Args:
        root: of the cache.
        wanted: numbers of URLs, and keys.
    """
    found: dict[tuple[int, str], Entry] = {}
    path = Layout(root).catalog
    if not path.exists():
        return found
    with Catalog.open(path, readonly=True) as catalog:
        ordinal = 0
        for stores, keys in catalog.names(0, len(catalog)):
            for one in zip(stores, keys, strict=True):
                if one in wanted:
                    found[one] = catalog.entry(ordinal)
                ordinal += 1
    return found
