"""DICOM objects hold what pydicom reads."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import FormatError
from growcache.formats import open_format
from tests.formats.held import Held, visited


def scan(values: Any, slope: float = 1, inter: float = 0, *, packed: bool = False) -> bytes:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import ExplicitVRLittleEndian, RLELossless

    made = pydicom.Dataset()
    made.SOPClassUID, made.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.2", "1.2.3"
    made.Rows, made.Columns = values.shape[-2:]
    made.NumberOfFrames = values.shape[0] if values.ndim == 3 else 1
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 8 * values.dtype.itemsize
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(values.dtype.kind == "i")
    made.RescaleSlope, made.RescaleIntercept = slope, inter
    made.PatientID, made.InstanceNumber, made.PixelSpacing = "p 1", 7, [0.5, 0.25]
    made.PixelData = values.tobytes() + bytes(values.nbytes % 2)
    made["PixelData"].VR = "OW" if values.dtype.itemsize > 1 else "OB"
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    if packed:
        frames = values[0] if values.ndim == 3 and len(values) == 1 else values
        made.compress(RLELossless, frames, encoding_plugin="pydicom")
    file = io.BytesIO()
    pydicom.dcmwrite(file, made, enforce_file_format=True)
    return file.getvalue()


def small() -> bytes:
    return scan(np.arange(60, dtype="i2").reshape(12, 5), 0.5, -3)


@given(data=st.data())
def test_pixels_are_what_pydicom_reads(data: st.DataObject) -> None:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.pixels import apply_rescale

    shape = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))
    dtype = data.draw(st.sampled_from(["u1", "u2", "i2"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = rng.integers(0, 200, shape).astype(dtype)
    scale = data.draw(st.sampled_from([(1, 0), (0.5, -3), (1, -1024)]))
    packed = scan(values, *scale, packed=data.draw(st.booleans()))
    read = pydicom.dcmread(io.BytesIO(packed))
    for meant, expected in (
        ("stored", read.pixel_array),
        ("rescaled", apply_rescale(read.pixel_array, read)),
    ):
        ((sample, *_),) = visited(open_format("dicom", {"values": meant}), Held(packed))
        assert sample["x"].dtype == expected.dtype
        np.testing.assert_array_equal(sample["x"], expected)
        np.testing.assert_array_equal(read.pixel_array.reshape(shape), values)


def test_attributes_become_fields() -> None:
    names = ["PatientID", "InstanceNumber", "PixelSpacing", "RescaleSlope"]
    ((sample, *_),) = visited(open_format("dicom", {"attributes": names}), Held(small()))
    assert sample["PatientID"] == "p 1"
    assert (sample["InstanceNumber"], sample["InstanceNumber"].dtype) == (7, np.int64)
    assert sample["PixelSpacing"].tolist() == [0.5, 0.25]
    assert (sample["RescaleSlope"], sample["RescaleSlope"].dtype) == (0.5, np.float64)


def test_what_is_not_there_or_cannot_be_true() -> None:
    with pytest.raises(FormatError, match="expected an attribute PatientAge, found none"):
        visited(open_format("dicom", {"attributes": ["PatientAge"]}), Held(small()))
    data = small()
    rows = data.index(b"\x28\x00\x10\x00US\x02\x00") + 8
    wrong = data[:rows] + b"\xff\xff" + data[rows + 2 :]
    with pytest.raises(FormatError, match="that pydicom decodes, found ValueError"):
        visited(open_format("dicom", {}), Held(wrong))


def test_a_deflated_object_is_not_inflated() -> None:
    pydicom = pytest.importorskip("pydicom")
    made = pydicom.dcmread(io.BytesIO(small()))
    made.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    pydicom.dcmwrite(file := io.BytesIO(), made)
    with pytest.raises(FormatError, match="expected a DICOM image that is not deflated"):
        visited(open_format("dicom", {}), Held(file.getvalue()))
