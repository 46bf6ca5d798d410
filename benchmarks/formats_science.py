"""Formats of science for benchmarks/formats.py: how their objects are made and read by hand.

The hand-written readers know the headers of recordings, volumes, images and sounds in advance, and the
places of tiles; the libraries of the fields would read these first. Chunks of HDF5 and Zarr are found by an index that
kerchunk made once, or by their names, and are fetched by obstore.
"""

from __future__ import annotations

import io
import threading
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.formats_arrays import CHUNK, STORED, make_hdf5, make_zarr
from benchmarks.formats_samples import CHANNELS, ROWS, Case, Take, ranges, values
from benchmarks.servers import KEY, SECRET

MANY, SOME = 2048, 1024  # samples of an object whose visits yield several samples, or one
SIGNALS, RATE = 64, 128  # of a recording: a second is 16 KiB of int16
EDF_HEAD = 256 * (1 + SIGNALS)
NIFTI_HEAD, FITS_HEAD, WAV_HEAD = 352, 2880, 44
FRAMES = 8192  # of a window of sound: 16 KiB of int16
PIXELS = 256  # of a DICOM image, along each axis: 128 KiB of uint16
TILE = 96  # pixels along each axis: 18 KiB of uint16


def make_edf(path: Path, rng: np.random.Generator, samples: int) -> int:
    import edfio

    signals = [
        edfio.EdfSignal.from_digital(
            rng.integers(-(1 << 15), 1 << 15, samples * RATE, np.int16),
            RATE,
            label=f"S{number}",
            physical_range=(-500, 500),
        )
        for number in range(SIGNALS)
    ]
    edfio.Edf(signals, data_record_duration=1).write(path)
    return samples * SIGNALS * RATE * 2


def edf_by_hand(files: Any) -> Take:
    second = SIGNALS * RATE * 2

    def take(key: str, number: int) -> Any:
        stored = np.frombuffer(ranges(files, key, EDF_HEAD + number * second, second), "<i2")
        return (stored.reshape(SIGNALS, RATE) + 0.5).astype("f4") * np.float32(1000 / 65535)

    return take


def make_nifti(path: Path, rng: np.random.Generator, samples: int) -> int:
    import nibabel

    volume = values(rng, samples).reshape(samples, ROWS, CHANNELS).T
    image = nibabel.Nifti1Image(volume, np.eye(4))
    path.write_bytes(image.to_bytes())
    return int(volume.nbytes)


def nifti_by_hand(files: Any) -> Take:
    return _plain(files, NIFTI_HEAD, "<f4", (CHANNELS, ROWS), "F")


def make_fits(path: Path, rng: np.random.Generator, samples: int) -> int:
    from astropy.io import fits

    image = values(rng, samples)
    with path.open("wb") as file:
        fits.PrimaryHDU(image).writeto(file)
    return int(image.nbytes)


def fits_by_hand(files: Any) -> Take:
    return _plain(files, FITS_HEAD, ">f4", (ROWS, CHANNELS), "C")


def _plain(files: Any, head: int, dtype: str, shape: tuple[int, ...], order: Any) -> Take:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize

    def take(key: str, number: int) -> Any:
        stored = np.frombuffer(ranges(files, key, head + number * nbytes, nbytes), dtype)
        return stored.reshape(shape, order=order)

    return take


def make_wav(path: Path, rng: np.random.Generator, samples: int) -> int:
    import soundfile

    frames = rng.integers(-(1 << 15), 1 << 15, samples * FRAMES, np.int16)
    soundfile.write(path, frames, 16000, "PCM_16", format="WAV")
    return int(frames.nbytes)


def wav_by_hand(files: Any) -> Take:
    def take(key: str, number: int) -> Any:
        data = ranges(files, key, WAV_HEAD + number * 2 * FRAMES, 2 * FRAMES)
        return np.frombuffer(data, "<i2").astype("f4") / (1 << 15)

    return take


def make_dicom(path: Path, rng: np.random.Generator, samples: int) -> int:
    import pydicom
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    made = pydicom.Dataset()
    made.SOPClassUID, made.SOPInstanceUID = CTImageStorage, generate_uid()
    made.Rows = made.Columns = PIXELS
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated = made.BitsStored = 16
    made.HighBit, made.PixelRepresentation = 15, 0
    made.PixelData = rng.integers(0, 1 << 16, (PIXELS, PIXELS), np.uint16).tobytes()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    pydicom.dcmwrite(path, made, enforce_file_format=True)
    return samples * PIXELS * PIXELS * 2


def dicom_by_hand(files: Any) -> Take:
    import pydicom

    def take(key: str, number: int) -> Any:
        return pydicom.dcmread(io.BytesIO(files.cat_file(key))).pixel_array

    return take


def make_tiff(path: Path, rng: np.random.Generator, samples: int) -> int:
    import tifffile

    side = 16 * TILE
    image = rng.integers(0, 1 << 12, (samples // 16 * TILE, side), np.uint16)
    tifffile.imwrite(path, image, tile=(TILE, TILE), compression="zlib", metadata=None)
    with tifffile.TiffFile(path) as opened:
        return int(sum(opened.pages[0].databytecounts))


def tiff_by_hand(files: Any) -> Take:
    import tifffile

    @cache
    def tiles(key: str) -> Any:
        with files.open(key, block_size=1 << 16) as file, tifffile.TiffFile(file) as opened:
            page = opened.pages[0]
            return list(zip(page.dataoffsets, page.databytecounts, strict=True))

    def take(key: str, number: int) -> Any:
        data = zlib.decompress(ranges(files, key, *tiles(key)[number]))
        return np.frombuffer(data, "<u2").reshape(TILE, TILE)

    return take


def _bucket(files: Any, name: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        name,
        endpoint=files.endpoint_url,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


def hdf5_by_index(files: Any) -> Take:
    """An index by kerchunk, one for each file, and ranges by obstore."""
    from kerchunk.hdf import SingleHdf5ToZarr

    making = threading.Lock()  # the library admits one at a time

    @cache
    def index(key: str) -> Any:
        with files.open(key) as file:
            return SingleHdf5ToZarr(file, key).translate()["refs"]

    def take(key: str, number: int) -> Any:
        with making:
            _, start, length = index(key)[f"x/{number // CHUNK}.0"]
        bucket, _, path = key.partition("/")
        data = store(bucket).get_range(path, start=start, length=length)
        rows = np.frombuffer(zlib.decompress(data), "<f4").reshape(CHUNK, ROWS, CHANNELS)
        return rows[number % CHUNK]

    store = cache(lambda bucket: _bucket(files, bucket))
    return take


def zarr_by_name(files: Any) -> Take:
    """Chunks by their names, which an index of VirtualiZarr would give, and obstore."""
    from numcodecs import zstd

    store = cache(lambda bucket: _bucket(files, bucket))

    def take(key: str, number: int) -> Any:
        bucket, _, path = key.partition("/")
        data = store(bucket).get(f"{path}/x/c/{number // STORED}/0").bytes()
        rows = np.frombuffer(zstd.decompress(bytes(data)), "<f4")
        return rows.reshape(STORED, ROWS, CHANNELS)[number % STORED]

    return take


def science_cases() -> list[Case]:
    window: dict[str, Any] = {"window": ROWS, "phase": "zero"}
    return [
        Case("hdf5 windows, an index by kerchunk", "hdf5", make_hdf5, hdf5_by_index, MANY, window,
             opens=True, needs="kerchunk"),
        Case("zarr windows, chunks by obstore", "zarr", make_zarr, zarr_by_name, 2 * MANY, window,
             objects="*.zarr/x/c/**", needs="zarr"),
        Case("edf windows", "edf", make_edf, edf_by_hand, SOME, {"window": "1s"}, needs="edfio",
             sample_bytes=SIGNALS * RATE * 4, amplification=1.2),
        Case("nifti slices", "nifti", make_nifti, nifti_by_hand, SOME, {"axis": -1},
             needs="nibabel", amplification=1.2),
        Case("fits cutouts", "fits", make_fits, fits_by_hand, SOME, {"window": ROWS},
             needs="astropy", amplification=1.2),
        Case("dicom", "dicom", make_dicom, dicom_by_hand, 1, needs="pydicom", count=2000,
             sample_bytes=2 * PIXELS * PIXELS, amplification=1.2),
        Case("wav windows", "audio", make_wav, wav_by_hand, SOME, {"window": FRAMES},
             needs="soundfile", sample_bytes=4 * FRAMES, amplification=1.2),
        Case("tiff tiles", "tiff", make_tiff, tiff_by_hand, SOME, {"window": [TILE, TILE]},
             opens=True, needs="tifffile", sample_bytes=2 * TILE * TILE, amplification=1.2),
    ]  # fmt: skip
