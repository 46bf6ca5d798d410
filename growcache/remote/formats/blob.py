"""An object is one sample: its bytes as they are, or what the user's function makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from growcache.errors import ConfigError
from growcache.remote.formats.objects import Measure, Reader, Visit, read_whole, refuse_unknown
from growcache.remote.formats.threads import Threads
from growcache.schema import Sample
from growcache.usercode import UserCode, load_code

_OPTIONS = ("decode",)


class WholeBytes:
    """The object's bytes as field ``data``, or decoded by a function of the user's."""

    ranged = False
    listed = True

    def __init__(self, decode: UserCode | None) -> None:
        self._decode = decode
        self._threads = Threads()
        self.code_digest = decode.digest if decode else None

    async def measure(self, reader: Reader) -> Measure:
        """See `ObjectFormat.measure`."""
        return Measure(float(reader.entry.size), 0, 1)

    async def read(self, reader: Reader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """See `ObjectFormat.read`."""
        data = bytes(memoryview(await read_whole(reader)))
        sample: Sample | None = {"data": data}
        if self._decode is not None:
            sample = await self._decoded(self._decode, reader.entry.key, data)
        return [] if sample is None else [(sample, 0, reader.entry.size)]

    async def _decoded(self, decode: UserCode, key: str, data: bytes) -> Sample | None:
        def work(_: object) -> Sample | None:
            result = decode(key, {"data": data, "key": key})
            return None if result is None else decode.sample(key, result)

        return await self._threads.run(work)


def open_bytes(options: Mapping[str, Any]) -> WholeBytes:
    """Return the format.

    Options:
        decode: ``package.module:function`` of ``data``, and ``key`` if it takes it, that
            returns the sample; None to leave the object out. It runs in threads of the
            samplers, several at once.

    Raises:
        ConfigError: an unknown option, or a function that cannot be loaded.
    """
    refuse_unknown("bytes", options, _OPTIONS)
    name = options.get("decode")
    if name is None:
        return WholeBytes(None)
    return WholeBytes(load_decoder(name))


def load_decoder(name: object) -> UserCode:
    """Return the user's function from bytes to a sample.

    Raises:
        ConfigError: it cannot be loaded, or does not take ``data``.
    """
    where = ("source.options.decode", "source.options")
    code = load_code(str(name), {}, ("data", "key"), where)
    if "data" not in code.parameters:
        raise ConfigError(f"source.options.decode: {name} must take data, and may take key")
    return code
