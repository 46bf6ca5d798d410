"""Whether a refusal is the object's or the store's, and clients that are made anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.config_source import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    CredentialsError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    StoreMissingError,
    StoreRefusedError,
    TransientStoreError,
)
from growcache.store.contract import Entry, Page
from growcache.store.retries import (
    RecentReads,
    RenewableBackend,
    RetryPolicy,
    is_transient,
    store_refusal,
)
from growcache.store.store import RemoteStore
from growcache.store.urls import Location, parse_url

if TYPE_CHECKING:
    from typing_extensions import Buffer

KEYS = [f"{number}" for number in range(8)]


class Fake:
    """A backend in which some keys fail with given errors."""

    identity = "fake"
    sorted = False

    def __init__(self, failures: dict[str, StoreError]) -> None:
        self.failures = failures
        self.asked: list[str] = []

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        yield Page(map(entry, KEYS))

    def head(self, key: str) -> Entry:
        return entry(key)

    async def get(self, one: Entry, start: int, stop: int) -> Buffer:
        self.asked.append(one.key)
        if (error := self.failures.get(one.key)) is not None:
            raise error
        return bytes(stop - start)

    async def close(self) -> None:
        return


def entry(key: str) -> Entry:
    return Entry(key, 4, None, None)


def store_of(
    *backends: Fake, on_retry: Callable[[BaseException], None] | None = None
) -> RemoteStore:
    """A store whose client is one of the backends after the other."""
    following = list(backends)
    client = RenewableBackend(
        lambda: following.pop(0) if len(following) > 1 else following[0],
        timeout_seconds=1,
        renew_seconds=0,
    )
    source = SourceConfig(url=("memory://x/*",))
    policy = RetryPolicy(1, on_retry, refusal_pauses=(0.0, 0.0))
    return RemoteStore(source, [(parse_url("memory://*"), client)], policy, 4)


ERRORS = [AccessError("no"), ObjectMissingError("gone"), StoreError("418")]
KINDS = [CredentialsError, StoreMissingError, StoreRefusedError]


@pytest.mark.parametrize(("error", "kind"), list(zip(ERRORS, KINDS, strict=True)))
def test_what_no_object_is_given_of_is_the_stores(
    error: StoreError, kind: type[StoreRefusedError]
) -> None:
    store = store_of(Fake(dict.fromkeys(KEYS, error)))
    with pytest.raises(kind, match=str(error)):
        asyncio.run(store.read(entry("3")))


@pytest.mark.parametrize("error", [*ERRORS, ObjectChangedError("rewritten")])
def test_what_others_are_given_of_is_the_objects(error: StoreError) -> None:
    store = store_of(Fake({"3": error}))
    with pytest.raises(StoreError) as caught:
        asyncio.run(store.read(entry("3")))
    assert caught.value is error


def test_that_the_last_objects_read_are_gone_says_nothing_of_the_store() -> None:
    """Old objects are deleted every night: other objects of the listing are requested."""
    backend = Fake({})
    store = store_of(backend)
    for key in ("0", "1"):
        asyncio.run(store.read(entry(key)))
    backend.failures = dict.fromkeys(("0", "1", "3"), ObjectMissingError("gone"))
    with pytest.raises(ObjectMissingError, match=r"(?m)^gone$"):
        asyncio.run(store.read(entry("3")))


def test_an_object_that_is_refused_is_doubted_once_not_at_each_part() -> None:
    told: list[BaseException] = []
    error = AccessError("no")
    backend = Fake({"3": error})
    store = store_of(backend, on_retry=told.append)
    for _ in range(3):
        with pytest.raises(AccessError):
            asyncio.run(store.read(entry("3")))
    assert backend.asked.count("3") == 3 + 1 + 1
    assert told == [error, error], (
        "each pause is reported, or the sampler would seem to be stuck"
    )
    backend.failures.clear()
    assert asyncio.run(store.read(entry("3"))) == bytes(4)


def test_a_store_that_does_not_say_is_waited_for() -> None:
    """Neither a hole nor a refusal: the group is tried again."""
    failures: dict[str, StoreError] = dict.fromkeys(KEYS, TransientStoreError("503"))
    store = store_of(Fake(failures | {"3": AccessError("no")}))
    with pytest.raises(TransientStoreError, match="503"):
        asyncio.run(store.read(entry("3")))


def test_a_new_client_is_asked_once_more() -> None:
    old = Fake(dict.fromkeys(KEYS, CredentialsError("expired")))
    assert asyncio.run(store_of(old, Fake({})).read(entry("3"))) == bytes(4)
    assert old.asked == ["3"]


def test_no_more_reads_are_in_flight_than_allowed() -> None:
    running: list[int] = [0]

    class Slow(Fake):
        async def get(self, one: Entry, start: int, stop: int) -> Buffer:
            running.append(running[-1] + 1)
            await asyncio.sleep(0.001)
            running.append(running[-1] - 1)
            return bytes(stop - start)

    store = store_of(Slow({}))

    async def many() -> None:
        await asyncio.gather(*(store.read(entry(key)) for key in KEYS * 3))

    asyncio.run(many())
    assert max(running) == 4


def test_many_refusals_are_one_question() -> None:
    backend = Fake(dict.fromkeys(KEYS, AccessError("no")))
    store = store_of(backend)

    async def all_of_them() -> list[object]:
        return await asyncio.gather(
            *(store.read(entry(key)) for key in KEYS), return_exceptions=True
        )

    assert {type(one) for one in asyncio.run(all_of_them())} == {CredentialsError}
    assert len(backend.asked) < 6 * len(
        KEYS
    )  # eight for each key, if each key made its own probe


def test_what_cannot_be_made_anew_lacks_credentials() -> None:
    made: list[Fake] = []

    def make() -> Fake:
        if made:
            raise ConfigError("no profile lab")
        made.append(Fake({}))
        return made[0]

    client = RenewableBackend(make, renew_seconds=0)
    with pytest.raises(CredentialsError, match="no profile lab"):
        client.renew(0)


def test_a_client_without_credentials_is_made_when_it_is_asked() -> None:
    made: list[Fake] = []

    def make() -> Fake:
        made.append(Fake({}))
        if len(made) < 3:
            raise CredentialsError("none yet")
        return made[-1]

    with pytest.raises(CredentialsError):
        RenewableBackend(make)
    client = RenewableBackend(make, without_credentials=True)
    assert client.head("x").key == "x"


@pytest.mark.parametrize("error", ERRORS)
def test_a_ruling_needs_no_store(error: StoreError) -> None:
    assert store_refusal(error, others_answer=True) is None
    assert isinstance(store_refusal(error, others_answer=False), StoreRefusedError)
    assert not is_transient(CredentialsError("no"))


def test_an_answer_without_a_word_may_be_about_credentials() -> None:
    """S3 answers 400 to HEAD, which lists named objects, where a token has expired."""

    class Wordless(Fake):
        def head(self, key: str) -> Entry:
            raise StoreError(f"{key}: the store answered 400")

    source = SourceConfig(url=("s3://b/x",))
    client = RenewableBackend(lambda: Wordless({}))
    store = RemoteStore(source, [(parse_url("s3://b/x"), client)], RetryPolicy(1), 4)
    with pytest.raises(CredentialsError, match="where credentials have expired"):
        list(store.pages())


@pytest.mark.parametrize("lapses", [1, 2, 3])
def test_a_lapse_that_ends_in_between_is_none_of_the_objects(lapses: int) -> None:
    """The object is refused a few times while others may be given, and then it is given."""

    class Lapsing(Fake):
        async def get(self, one: Entry, start: int, stop: int) -> Buffer:
            self.asked.append(one.key)
            if len(self.asked) <= lapses:
                raise AccessError("no")
            return bytes(stop - start)

    backend = Lapsing({})
    try:
        assert asyncio.run(store_of(backend).read(entry("3"))) == bytes(4)
    except StoreRefusedError:
        assert lapses > 1


def test_what_was_before_the_request_says_nothing() -> None:
    recent = RecentReads()
    recent.record(entry("a"), time.monotonic())
    assert not recent.has_other_since("b", time.monotonic() + 1)
    assert recent.other_objects("b") == [entry("a")]


def test_what_was_let_in_before_a_refusal_says_nothing_about_it() -> None:
    recent = RecentReads()
    refused_at = time.monotonic()
    recent.record(entry("a"), refused_at - 1)
    assert recent.has_other_since("b", refused_at)
    assert not recent.has_other_requested_since("b", refused_at)
    recent.record(entry("a"), refused_at + 1)
    assert recent.has_other_requested_since("b", refused_at)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.sampled_from("abc"))
def test_as_if_all_reads_were_kept(reads: list[str], key: str) -> None:
    recent = RecentReads()
    for one in reads:
        recent.record(entry(one), 0.0)
    assert recent.has_other_since(key, 0.0) == any(one != key for one in reads)
    others = [one for one in reads if one != key]
    assert recent.other_objects(key)[:1] == [entry(one) for one in others[-1:]]
