"""DICOM by pydicom: the pixels of an object and chosen attributes are one sample."""

from __future__ import annotations

import asyncio
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from growcache.errors import FormatError
from growcache.formats.base import (
    ObjectFormat,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    bool_option,
    choice_option,
    names_option,
    read_whole,
    refuse_unknown_options,
    require_library,
)
from growcache.formats.contiguous import native_order
from growcache.formats.memory import correct_decoded, refuse_large_sample, reserve_decoded
from growcache.formats.whole_arrays import refuse_large_array
from growcache.schema import Array
from growcache.store.contract import Entry

if TYPE_CHECKING:
    from typing_extensions import Buffer

_OPTIONS = ("attributes", "values", "force")
_PHYSICAL_BYTES = 8  # of a value
_DEFLATED = b"1.2.840.10008.1.2.1.99"  # pydicom inflates these without a bound


class DicomFormat(ObjectFormat):
    def __init__(self, attributes: Sequence[str], *, physical: bool, force: bool) -> None:
        self._attributes, self._physical, self._force = attributes, physical, force

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        data, entry = await read_whole(reader), reader.entry
        if _DEFLATED in bytes(memoryview(data)):
            raise FormatError(
                f"{entry.key}: expected a DICOM image that is not deflated as a whole; write it with "
                "another transfer syntax, as with dcmconv +te",
                code="GC304",
            )
        dataset, nbytes = await asyncio.to_thread(self._parsed, data, entry)
        refuse_large_array(nbytes, entry)
        refuse_large_sample(nbytes, entry.key)
        await reserve_decoded(nbytes)
        pixels = await asyncio.to_thread(self._pixels, dataset, entry)
        correct_decoded(pixels.nbytes, nbytes)
        fields = {name: _attribute(dataset, name, entry) for name in self._attributes}
        return [({"x": pixels, **fields}, 0, entry.size)]

    def _parsed(self, data: Buffer, entry: Entry) -> tuple[Any, int]:
        """Return the parsed object, and the number of bytes of its pixels."""
        import pydicom

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dataset = pydicom.dcmread(io.BytesIO(memoryview(data)), force=self._force)
                frames = int(dataset.get("NumberOfFrames") or 1)
                values = frames * dataset.Rows * dataset.Columns * dataset.SamplesPerPixel
                itemsize = _PHYSICAL_BYTES if self._physical else dataset.BitsAllocated // 8
                return dataset, int(values) * max(1, itemsize)
        except Exception as error:  # a damaged object can make pydicom raise anything
            raise _unreadable_error(entry, error) from error

    def _pixels(self, dataset: Any, entry: Entry) -> Array:
        from pydicom.pixels import apply_rescale

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = dataset.pixel_array
                found = apply_rescale(found, dataset) if self._physical else found
        except Exception as error:  # and so can its decoders
            raise _unreadable_error(entry, error) from error
        return native_order(np.asarray(found))


def _unreadable_error(entry: Entry, error: Exception) -> FormatError:
    words = " ".join(str(error).split())[:300]
    return FormatError(
        f"{entry.key}: expected a DICOM image that pydicom decodes, found "
        f"{type(error).__name__}: {words}"
    )


def _attribute(dataset: Any, name: str, entry: Entry) -> Any:
    """Return an attribute: a number, several numbers, a text or bytes."""
    try:
        value = dataset.get(name)
    except Exception as error:  # pydicom parses values at their first use
        raise _unreadable_error(entry, error) from error
    if value is None or value == "":
        raise FormatError(
            f"{entry.key}: expected an attribute {name}, found none", code="GC303"
        )
    if isinstance(value, bytes):
        return value
    if isinstance(value, int):
        return np.asarray(int(value), np.int64)
    if isinstance(value, float):
        return np.asarray(float(value), np.float64)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _several(value, name, entry)
    return str(value)


def _several(value: Sequence[Any], name: str, entry: Entry) -> Any:
    if all(isinstance(one, int | float) for one in value):
        return np.asarray([float(one) for one in value], np.float64)
    if any(hasattr(one, "keys") for one in value):
        raise FormatError(
            f"{entry.key}: attribute {name} is a sequence of datasets", code="GC303"
        )
    return "\\".join(map(str, value))


def open_dicom(options: Mapping[str, Any]) -> DicomFormat:
    refuse_unknown_options("dicom", options, _OPTIONS)
    require_library("source.format: dicom", "pydicom", "dicom")
    attributes = names_option("attributes", options.get("attributes"), "keywords") or ()
    values = choice_option(options, "values", ("stored", "rescaled"), "stored")
    return DicomFormat(
        attributes, physical=values == "rescaled", force=bool_option(options, "force")
    )
