"""A bucket of Google's as its XML API is documented: pages, where to begin, and conditions.

Made up by the tests: it shows that growcache asks as the documentation says, not that Google
answers so. See https://cloud.google.com/storage/docs/xml-api/get-bucket-list
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.servers.threads import DATED, Handler, in_threads

_DATE = "2026-01-01T00:00:00.000Z"
PAGE = 1000


class ImaginedGcs:
    """What is in the bucket ``b``, and what was asked of it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.listings: list[dict[str, str]] = []
        self.refusal: tuple[int, bytes] | None = None
        self.endpoint = ""


class _Handler(Handler):
    always: ClassVar = DATED
    state: ImaginedGcs

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        if self.state.refusal:
            self.answer(*self.state.refusal)
        elif bucket != "b":
            self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif key:
            self._object(key)
        else:
            self._page({name: values[0] for name, values in parse_qs(address.query).items()})

    do_HEAD = do_GET

    def _page(self, query: dict[str, str]) -> None:
        self.state.listings.append(query)
        after = query.get("continuation-token") or query.get("start-after") or ""
        prefix = query.get("prefix", "")
        left = [k for k in sorted(self.state.objects) if k.startswith(prefix) and k > after]
        page = left[: min(PAGE, int(query.get("max-keys", PAGE)))]
        rows = "".join(self._row(key) for key in page)
        more = len(page) < len(left)
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        self.answer(
            200,
            "<ListBucketResult><Name>b</Name>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
            "</ListBucketResult>".encode(),
        )

    def _row(self, key: str) -> str:
        data = self.state.objects[key]
        return (
            f"<Contents><Key>{escape(key)}</Key><Generation>1</Generation>"
            f"<LastModified>{_DATE}</LastModified><ETag>{escape(_etag(data))}</ETag>"
            f"<Size>{len(data)}</Size></Contents>"
        )

    def _object(self, key: str) -> None:
        data = self.state.objects.get(key)
        if data is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if self.headers.get("If-Match", _etag(data)) != _etag(data):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.answer_object(data, {"ETag": _etag(data)})


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextlib.contextmanager
def imagined_gcs() -> Iterator[ImaginedGcs]:
    """A running server, in threads of this process."""
    state = ImaginedGcs()
    with in_threads(_Handler, state=state) as state.endpoint:
        yield state
