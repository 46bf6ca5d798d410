"""A read-only binary file. Subclasses provide its bytes."""

from __future__ import annotations

import io


class SeekableFile(io.RawIOBase):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[
            whence
        ] + offset
        if at < 0:
            raise ValueError(f"expected a position of at least 0, found {at}")
        self.position = at
        return at
