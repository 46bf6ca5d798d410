"""An S3 bucket that is computed: 10^5 tiny objects and a huge one, none of them anywhere."""

from __future__ import annotations

import bisect
import contextlib
import io
from collections.abc import Iterator
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np

from tests.servers.threads import DATED, Handler, in_threads

TINY = 100_000
TINY_ROWS = 2
HUGE_BYTES = 5_000_000_000
ROW_BYTES = 16
_DATE = "2026-01-01T00:00:00.000Z"
_PAGE = 1000


def _header(rows: int) -> bytes:
    file = io.BytesIO()
    described = {"descr": "<i8", "fortran_order": False, "shape": (rows, 2)}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


HUGE_ROWS = (HUGE_BYTES - 128) // ROW_BYTES
KEYS = ["huge.npy", *(f"tiny/{number:06}.npy" for number in range(TINY))]


def size(key: str) -> int:
    """Bytes of an object."""
    rows = HUGE_ROWS if key == "huge.npy" else TINY_ROWS
    return len(_header(rows)) + rows * ROW_BYTES


def content(key: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an object: row r of the huge one is (r, r), of tiny n (n, -r)."""
    huge = key == "huge.npy"
    head = _header(HUGE_ROWS if huge else TINY_ROWS)
    first = max(0, start - len(head)) // ROW_BYTES
    last = max(0, stop - len(head) + ROW_BYTES - 1) // ROW_BYTES
    rows = np.arange(first, last, dtype="<i8")
    other = rows if huge else np.full(len(rows), int(key[5:11]), "<i8")
    data = np.stack([rows, rows] if huge else [other, -rows], axis=1).tobytes()
    base = len(head) + first * ROW_BYTES
    return head[start:stop] + data[max(0, start - base) : max(0, stop - base)]


class _Handler(Handler):
    always: ClassVar = {**DATED, "ETag": '"e"'}

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        _, _, key = unquote(address.path).lstrip("/").partition("/")
        if key:
            self._object(key)
        else:
            self._page({name: values[0] for name, values in parse_qs(address.query).items()})

    def _page(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after") or ""
        prefix = query.get("prefix", "")
        at = max(bisect.bisect_right(KEYS, after), bisect.bisect_left(KEYS, prefix))
        page = [key for key in KEYS[at : at + _PAGE] if key.startswith(prefix)]
        more = at + _PAGE < len(KEYS) and len(page) == _PAGE
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size(key)}</Size><ETag>&quot;e&quot;"
            f"</ETag><LastModified>{_DATE}</LastModified></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        self.answer(
            200,
            "<ListBucketResult><Name>b</Name>"
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{rows}</ListBucketResult>".encode(),
        )

    def _object(self, key: str) -> None:
        total = size(key)
        start, stop, ranged = self.span(total)
        if stop - start > 1 << 24:
            self.answer(400, b"nobody should ask for so much at once")
            return
        self.answer(206 if ranged else 200, content(key, start, stop), ranged)


@contextlib.contextmanager
def imagined() -> Iterator[dict[str, object]]:
    """The storage options of a server of the bucket ``b``, in threads of this process."""
    with in_threads(_Handler) as address:
        yield {"endpoint_url": address, "anon": True}
