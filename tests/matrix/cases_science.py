"""Scans, images of the sky, sound and recordings, as the libraries of their fields write them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

VOLUME = (6, 8, 10)


def numbers(dtype: str, shape: tuple[int, ...], first: int = 0) -> Any:
    return (np.arange(first, first + np.prod(shape)) % 120).reshape(shape).astype(dtype)


# --- nibabel


def write_nifti(folder: Path, dtype: str, ending: str, slope: float | None = None) -> None:
    import nibabel

    for i in range(2):
        image = nibabel.Nifti1Image(numbers(dtype, VOLUME, i), np.eye(4), dtype=dtype)
        if slope is not None:
            image.header.set_slope_inter(slope, 1)
        nibabel.save(image, folder / f"{i}{ending}")


def read_nifti(place: Place, *, whole: bool) -> Values:
    import nibabel

    volume = np.asanyarray(nibabel.load(place.path).dataobj)
    return {"x": volume if whole else volume[place.start : place.stop]}


def _nifti(dtype: str, ending: str, slope: float | None = None, **options: Any) -> Case:
    scaled = "" if slope is None else " with a slope"
    return Case(
        "nibabel",
        f"{ending} of {dtype}{scaled}",
        "nifti",
        partial(write_nifti, dtype=dtype, ending=ending, slope=slope),
        partial(read_nifti, whole=not options),
        6 if options else 2,
        options,
        needs=("nibabel",),
    )


NIFTI = [
    _nifti("<i2", ".nii"),
    _nifti("<f4", ".nii.gz"),
    _nifti("<u1", ".nii", window=2, axis=0),
    _nifti("<f4", ".nii.gz", window=2, axis=0),
    _nifti("<i2", ".nii", 0.5),
]

# --- astropy


def write_fits(folder: Path, dtype: str, **header: Any) -> None:
    from astropy.io import fits

    for i in range(2):
        hdu = fits.PrimaryHDU(numbers(dtype, (12, 20), i))
        if "bzero" in header:
            hdu.scale(dtype, bzero=header["bzero"])
        hdu.writeto(folder / f"{i}.fits")


def read_fits(place: Place, *, whole: bool) -> Values:
    from astropy.io import fits

    image = fits.getdata(place.path)
    return {"x": image if whole else image[place.start : place.stop]}


def write_fits_table(folder: Path) -> None:
    from astropy.table import Table

    for i in range(2):
        columns = {"flux": numbers("f4", (12,), i), "spectrum": numbers("i2", (12, 5), i)}
        Table(columns).write(folder / f"{i}.fits")


def read_fits_row(place: Place) -> Values:
    from astropy.table import Table

    row = Table.read(place.path)[place.start]
    return {name: np.asarray(row[name]) for name in row.colnames}


FITS = [
    *(
        Case("astropy", f"an image of {dtype}", "fits", partial(write_fits, dtype=dtype),
             partial(read_fits, whole=True), 2, needs=("astropy",))
        for dtype in ("i2", "f4", "f8", "u1", "i4")
    ),
    Case("astropy", "an image of f4", "fits", partial(write_fits, dtype="f4"),
         partial(read_fits, whole=False), 8, {"axis": 0, "window": 3}, needs=("astropy",)),
    Case("astropy", "a table with a vector in each row", "fits", write_fits_table, read_fits_row, 24,
         {"table": 1}, needs=("astropy",)),
]  # fmt: skip

# --- soundfile

RATE = 8000


def write_sound(folder: Path, ending: str, subtype: str, channels: int) -> None:
    import soundfile

    rng = np.random.default_rng(0)
    for i in range(2):
        sound = rng.uniform(-0.9, 0.9, (1000, channels))
        soundfile.write(folder / f"{i}{ending}", sound, RATE, subtype)


def read_sound(place: Place) -> Values:
    import soundfile

    sound, _ = soundfile.read(place.path, dtype="float32", always_2d=True)
    window = sound[place.start : place.stop]
    return {"x": window[:, 0] if sound.shape[1] == 1 else window}


def _sound(ending: str, subtype: str, channels: int, **options: Any) -> Case:
    return Case(
        "soundfile",
        f"{ending} of {subtype}, {channels} channels",
        "audio",
        partial(write_sound, ending=ending, subtype=subtype, channels=channels),
        read_sound,
        20,
        {"window": 100, **options},
        needs=("soundfile",),
    )


SOUND = [
    *(_sound(".wav", subtype, 2) for subtype in ("PCM_16", "PCM_24", "PCM_32", "FLOAT", "PCM_U8")),
    _sound(".wav", "DOUBLE", 1),
    _sound(".flac", "PCM_16", 2, read="whole"),
    _sound(".ogg", "VORBIS", 1, read="whole"),
]  # fmt: skip

# --- pydicom


def write_dicom(folder: Path) -> None:
    from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    for i in range(2):
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid()
        scan = FileDataset(str(folder), Dataset(), file_meta=meta, preamble=bytes(128))
        pixels = numbers("<u2", (8, 10), i)
        scan.Rows, scan.Columns = pixels.shape
        scan.BitsAllocated = scan.BitsStored = 16
        scan.HighBit, scan.PixelRepresentation, scan.SamplesPerPixel = 15, 0, 1
        scan.PhotometricInterpretation = "MONOCHROME2"
        scan.PatientID = f"p{i}"
        scan.PixelData = pixels.tobytes()
        scan.save_as(folder / f"{i}.dcm")


def read_dicom(place: Place) -> Values:
    import pydicom

    return {"x": pydicom.dcmread(place.path).pixel_array}


DICOM = [Case("pydicom", "an image of 16 bits", "dicom", write_dicom, read_dicom, 2, needs=("pydicom",))]  # fmt: skip

# --- edfio and pyedflib


def write_edf(folder: Path) -> None:
    import edfio

    rng = np.random.default_rng(0)
    for i in range(2):
        signals = [
            edfio.EdfSignal(rng.uniform(-50, 50, 1000), 100, label=label, physical_range=(-60, 60))
            for label in ("Fz", "Cz")
        ]  # fmt: skip
        edfio.Edf(signals).write(folder / f"{i}.edf")


def write_bdf(folder: Path) -> None:
    import pyedflib

    rng = np.random.default_rng(0)
    for i in range(2):
        path = str(folder / f"{i}.bdf")
        with pyedflib.EdfWriter(path, 2, pyedflib.FILETYPE_BDF) as writer:
            writer.setSignalHeaders(
                [
                    pyedflib.highlevel.make_signal_header(
                        label, "uV", 100, -60, 60, -8388608, 8388607
                    )
                    for label in ("Fz", "Cz")
                ]
            )
            writer.writeSamples([rng.uniform(-50, 50, 1000) for _ in range(2)])


def read_recording(place: Place) -> Values:
    import pyedflib

    with pyedflib.EdfReader(str(place.path)) as reader:
        length = place.stop - place.start
        signals = [reader.readSignal(i, place.start, length) for i in range(2)]
    return {"x": np.array(signals, "<f4")}


EDF = [
    Case("edfio", "two signals of .edf", "edf", write_edf, read_recording, 20, {"window": 100},
         needs=("edfio", "pyedflib")),
    Case("pyedflib", "two signals of .bdf", "edf", write_bdf, read_recording, 20, {"window": 100},
         needs=("pyedflib",)),
    Case("edfio", "two signals of .edf", "edf", write_edf, read_recording, 38,
         {"window": "1s", "stride": "500ms"}, needs=("edfio", "pyedflib")),
]  # fmt: skip
CASES = [*NIFTI, *FITS, *SOUND, *DICOM, *EDF]
