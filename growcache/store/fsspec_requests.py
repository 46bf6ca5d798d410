"""The requests of fsspec's clients: a read of one version per protocol, S3's pages, and web sessions.

fsspec's own reads ask for no version and believe any range. A web session sends headers, cookies and
passwords to the servers of ``source.url`` only, because aiohttp would send them along a redirect.
"""

from __future__ import annotations

import re
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from growcache.errors import ObjectChangedError, StoreError, TransientStoreError
from growcache.store.contract import Entry, Page
from growcache.store.response_check import (
    BrokenReadError,
    RangeSupport,
    check_has_version,
    check_length,
    check_range,
    check_response,
    http_seconds,
    response_of,
)
from growcache.store.urls import WEB_SCHEMES, Location

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientResponse, ClientSession

    Handler = Callable[[ClientRequest], Awaitable[ClientResponse]]

ServerAddress = tuple[str, str, int]

_DEFAULT_PORTS = {"http": 80, "https": 443}
# They say what is asked for, and by which program, not who asks.
_PUBLIC_HEADERS = frozenset({"accept", "accept-encoding", "accept-language", "user-agent"})


@dataclass(frozen=True)
class GuardedSession:
    """Makes sessions for fsspec's HTTP file system."""

    origins: frozenset[ServerAddress]
    headers: frozenset[str]
    cookies: frozenset[str]
    users: frozenset[str] = field(repr=False)
    checks_ranges: bool

    async def __call__(self, **options: Any) -> ClientSession:
        """Return a session; called by fsspec."""
        from aiohttp import ClientSession

        # Where nothing is to be kept back, it would take a twentieth of a small read for nothing.
        if self.headers or self.cookies or self.users or self.checks_ranges:
            options["middlewares"] = (*options.get("middlewares", ()), self._guarded)
        return ClientSession(**options)

    async def _guarded(self, request: ClientRequest, handler: Handler) -> ClientResponse:
        """Send one request, which may be one that follows a redirect."""
        url = request.url
        # The first is looked at at once, the second says how a name beyond ASCII is sent.
        origin = url.scheme, url.host, url.port
        if origin not in self.origins and server_address(str(url)) not in self.origins:
            self._strip(request.headers)
        response = await handler(request)
        if self.checks_ranges and response.status == 206:
            asked = request.headers.get("Range", "")
            if not is_requested_range(asked, response.headers.get("Content-Range", "")):
                from aiohttp import ClientPayloadError

                response.close()
                raise ClientPayloadError(f"another range than {asked}")
        return response

    def _strip(self, headers: Any) -> None:
        for name in self.headers:
            headers.popall(name, None)
        if headers.get("Authorization") in self.users:
            headers.popall("Authorization")
        cookies = "; ".join(headers.popall("Cookie", ()))
        if kept := remaining_cookies(cookies, self.cookies):
            headers["Cookie"] = kept


def guarded_session(
    addresses: Iterable[str], options: Mapping[str, Any], *, checks_ranges: bool
) -> GuardedSession:
    """Return what makes sessions for these addresses."""
    places = [options, options.get("client_kwargs") or {}]
    headers = {str(name).lower() for place in places for name in place.get("headers") or ()}
    cookies = {str(name) for place in places for name in place.get("cookies") or ()}
    users = {place["auth"].encode() for place in places if place.get("auth")}
    return GuardedSession(
        frozenset(map(server_address, addresses)),
        frozenset(headers - _PUBLIC_HEADERS),
        frozenset(cookies),
        frozenset(users),
        checks_ranges,
    )


def with_guarded_sessions(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a URL so that its web servers are asked by `GuardedSession`."""
    addresses = [part for part in url.split("::") if urlsplit(part).scheme in WEB_SCHEMES]
    made = dict(options)
    if "::" not in url:
        session = guarded_session(addresses, options, checks_ranges=False)
        return {"get_client": session, **made} if addresses else made
    for scheme in {urlsplit(address).scheme for address in addresses}:
        own = dict(options.get(scheme) or {})
        session = guarded_session(addresses, own, checks_ranges=True)
        made[scheme] = {"get_client": session, **own}
    return made


def server_address(address: str) -> ServerAddress:
    """Return scheme, host and port of a web address.

    >>> server_address("http://u:p@Lab.org/x"), server_address("https://lab.org:80/")
    (('http', 'lab.org', 80), ('https', 'lab.org', 80))
    """
    parts = urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def remaining_cookies(text: str, without: frozenset[str]) -> str:
    """Return a Cookie header without some of its cookies.

    >>> remaining_cookies("a=1; b=2; c=3", frozenset({"b"}))
    'a=1; c=3'
    """
    return "; ".join(
        part for part in text.split("; ") if part.partition("=")[0].strip() not in without
    )


def is_requested_range(asked: str, told: str) -> bool:
    """Whether a Content-Range header answers a Range header.

    A range may end earlier than it was asked for, because the object does.

    >>> is_requested_range("bytes=5-9", "bytes 5-9/20"), is_requested_range("bytes=5-9", "bytes 0-4/20")
    (True, False)
    >>> is_requested_range("bytes=5-9", "bytes 5-7/8"), is_requested_range("bytes=-4", "bytes 16-19/20")
    (True, True)
    """
    found = re.fullmatch(r"\s*bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\s*", told)
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if found is None or wanted is None:
        return False
    first, last, total = int(found[1]), int(found[2]), found[3]
    if not wanted[1]:  # the end of it
        return last - first + 1 <= int(wanted[2]) and total in (str(last + 1), "*")
    is_end = total in (str(last + 1), "*")
    return first == int(wanted[1]) and (str(last) == wanted[2] or is_end)


_READ_CHUNK_BYTES = 1 << 24  # read at once, whatever a server promises
RangeGetter = Callable[[Any, str, Entry, int, int], Coroutine[Any, Any, bytes]]
_LAST_MODIFIED_HEADER = "Last-Modified"
_MTIME_NAMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def entry_of_info(key: str, info: Mapping[str, Any]) -> Entry:
    etag = info.get("ETag") or info.get("etag")
    if info["size"] is None:
        raise StoreError(f"{key}: the store does not tell its size, so it cannot be divided")
    # Of web servers the ETag is enough; where there is none, the time is what there is.
    modified = (
        _mtime_of_info(info)
        if etag
        else _mtime_of_info(info) or http_seconds(info.get(_LAST_MODIFIED_HEADER))
    )
    return Entry(key, int(info["size"]), etag and str(etag), modified)


def _mtime_of_info(info: Mapping[str, Any]) -> float | None:
    for name in _MTIME_NAMES:
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None


def check_same_info(entry: Entry, info: Mapping[str, Any]) -> None:
    found = entry_of_info(entry.key, info)
    if (found.size, found.etag, found.mtime) != (entry.size, entry.etag, entry.mtime):
        raise ObjectChangedError(
            f"{entry.key} was rewritten since it was listed: expected {entry.size} bytes of "
            f"{entry.etag or entry.mtime}, found {found.size} of {found.etag or found.mtime}"
        )


async def get_plain(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    data: bytes = await fs._cat_file(path, start=start, end=stop)
    check_same_info(entry, await fs._info(path))
    return data


async def _get_s3(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """One conditional request; `_cat_file` would ask for the size first, and not for a version."""
    wanted = {"IfMatch": entry.etag} if entry.etag else {}
    if ranged := _is_partial(entry, start, stop):
        wanted["Range"] = f"bytes={start}-{stop - 1}"
    bucket = path.partition("/")[0]
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=entry.key, **wanted)
    async with answer["Body"] as body:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        _require_partial(entry, ranged, status)
        check_response(entry, (start, stop), response_of(entry, (start, stop), status, headers))
        return await _read_at_most(body.read, stop - start, entry)


async def _get_gcs(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """As `get_plain`; `_cat_file` would not look at which range it was given."""
    ranged = _is_partial(entry, start, stop)
    headers = {"Range": f"bytes={start}-{stop - 1}"} if ranged else {}
    status, told, _, data = await fs._request("GET", fs.url(path), headers=headers)
    _require_partial(entry, ranged, status)
    # Its ETag is not the one of the listing, which another request is compared with.
    response = response_of(entry, (start, stop), status, told)
    check_range(entry, (start, stop), response)
    check_has_version(entry, response)
    if "content-encoding" in told and len(data) != stop - start:
        raise StoreError(
            f"{entry.key}: expected {stop - start} bytes, found {len(data)}: it is stored with "
            f"Content-Encoding {told['content-encoding']}, which the client unpacks; store it "
            "without"
        )
    check_same_info(entry, await fs._info(path))
    return bytes(data)


async def _get_azure(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """One conditional download; `_cat_file` would ask for no version, and believe any range."""
    from azure.core import MatchConditions

    condition = {"etag": entry.etag, "match_condition": MatchConditions.IfNotModified}
    container, blob, version = fs.split_path(path)
    async with fs.service_client.get_blob_client(container, blob) as client:
        try:
            download = await client.download_blob(
                offset=start,
                length=stop - start,
                version_id=version,
                max_concurrency=fs.max_concurrency,
                raw_response_hook=partial(_check_azure_response, entry),
                **(condition if entry.etag else {}),
                **fs._timeout_kwargs,
            )
            return bytes(await download.readall())
        except (IndexError, ValueError):  # the client itself takes the header apart
            raise BrokenReadError(
                f"{entry.key}: the store sent a part of the object without telling which"
            ) from None


def _check_azure_response(entry: Entry, answer: Any) -> None:
    """Check one of the responses of which a download consists."""
    response = answer.http_response
    if response.status_code not in (200, 206):
        return
    headers = answer.http_request.headers
    asked = headers.get("x-ms-range") or headers.get("Range") or ""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    wanted = (int(first or 0), min(int(last) + 1 if last else entry.size, entry.size))
    _require_partial(entry, bool(asked), response.status_code)
    check_response(
        entry, wanted, response_of(entry, wanted, response.status_code, response.headers)
    )


def _is_partial(entry: Entry, start: int, stop: int) -> bool:
    return start > 0 or stop < entry.size


def _require_partial(entry: Entry, ranged: bool, status: int) -> None:
    if ranged and status != 206:
        raise BrokenReadError(
            f"{entry.key}: expected a part of the object (206), the store answered {status}"
        )


async def _read_at_most(
    read: Callable[[int], Awaitable[bytes]], most: int, entry: Entry
) -> bytes:
    """Return what is read to the end; a server that sends more than was asked for is left.

    Raises:
        BrokenReadError: it does.
    """
    pieces, found = [], 0
    while piece := await read(min(most + 1 - found, _READ_CHUNK_BYTES)):
        pieces.append(piece)
        if (found := found + len(piece)) > most:
            raise BrokenReadError(f"{entry.key}: expected {most} bytes, the store sends more")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _get_web(
    support: RangeSupport, fs: Any, address: str, entry: Entry, start: int, stop: int
) -> bytes:
    """One request, whose answer says which version it is."""
    settings = dict(fs.kwargs)
    # Packed, a range would be one of other bytes, and its size whatever the server makes it.
    headers = {"Accept-Encoding": "identity", **settings.pop("headers", {})}
    if ranged := _is_partial(entry, start, stop):
        headers["Range"] = f"bytes={start}-{stop - 1}"
    if entry.etag and not entry.etag.startswith("W/"):
        headers["If-Match"] = entry.etag
    session = await fs.set_session()
    async with session.get(fs.encode_url(address), headers=headers, **settings) as answer:
        answer.raise_for_status()
        is_whole = answer.status != 206
        wanted = (0, entry.size) if is_whole else (start, stop)
        told = response_of(entry, wanted, answer.status, answer.headers)
        check_response(entry, wanted, told)
        if ranged:
            support.take_in(whole=is_whole)
        data = await _read_at_most(answer.content.read, wanted[1] - wanted[0], entry)
    check_length(entry, wanted, len(data))
    return data[start:stop] if is_whole else data


_GETTERS: Mapping[str, RangeGetter] = {
    **dict.fromkeys(("s3", "s3a"), _get_s3),
    **dict.fromkeys(("gs", "gcs"), _get_gcs),
    **dict.fromkeys(("az", "abfs", "abfss"), _get_azure),
}


def range_getter(location: Location) -> RangeGetter:
    """Return how a range of an object is read."""
    if location.scheme in WEB_SCHEMES:
        return partial(_get_web, RangeSupport(location.root))
    return _GETTERS.get(location.scheme, get_plain)


def s3_pages(fs: Any, bucket: str, prefix: str, after: str | None) -> Iterator[Page]:
    """Yield pages as they come; `find` would hold them all back until the last."""
    more = {"StartAfter": after} if after else {}
    fs.connect()  # by itself, because what options it refuses is no fault of the listing
    while True:
        answer = _s3_page(fs, bucket, Prefix=prefix, **more)
        last = not answer.get("IsTruncated")
        yield Page(_s3_entries(bucket, answer.get("Contents", ())), last=last)
        if last:
            return
        token = answer.get("NextContinuationToken")
        if not token or token == more.get("ContinuationToken"):
            raise StoreError(
                f"s3://{bucket}: the listing does not tell where its next page begins, so it "
                "cannot be listed to its end"
            )
        more = {"ContinuationToken": token}


def _s3_page(fs: Any, bucket: str, **asked: str) -> Mapping[str, Any]:
    try:
        answer: Mapping[str, Any] = fs.call_s3("list_objects_v2", Bucket=bucket, **asked)
    except (KeyError, TypeError, ValueError) as error:  # as the library takes it apart
        raise StoreError(
            f"s3://{bucket}: its listing cannot be read ({type(error).__name__}: {error})"
        ) from None
    if not _S3_LISTING_FIELDS & answer.keys():
        raise TransientStoreError(
            f"s3://{bucket}: its answer is no listing, but something else"
        )
    return answer


# What every S3 has at least one of, for an empty listing too.
_S3_LISTING_FIELDS = frozenset({"IsTruncated", "KeyCount", "Name", "Contents"})


def _s3_entries(bucket: str, rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Return the entries of a page, but for markers of folders.

    Raises:
        StoreError: an entry lacks what each has.
    """
    try:
        return [
            Entry(row["Key"], row["Size"], row.get("ETag"), row["LastModified"].timestamp())
            for row in rows
            if row["Size"] or not row["Key"].endswith("/")
        ]
    except KeyError as error:
        raise StoreError(
            f"s3://{bucket}: an entry of the listing lacks {error.args[0]}, so it cannot be used"
        ) from None
