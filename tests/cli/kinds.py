"""Small sources as scientists have them, each written by the library that the field uses.

A writer makes the files in an empty folder and returns the URL that a person would give to ``growcache init``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

KINDS: dict[str, Callable[[Path], str]] = {}
SLOW: set[str] = set()  # kinds whose library takes long to import


def kind(name: str, *, slow: bool = False) -> Callable[..., Callable[[Path], str]]:
    def keep(write: Callable[[Path], str]) -> Callable[[Path], str]:
        KINDS[name] = write
        if slow:
            SLOW.add(name)
        return write

    return keep


def noise(*shape: int, dtype: str = "f4") -> Any:
    """A signal that changes slowly along the first axis, as a recording does."""
    random = np.random.default_rng(0)
    values = 300 * np.sin(np.arange(shape[0]) / 40)
    return (values.reshape(-1, *[1] * (len(shape) - 1)) + random.normal(0, 20, shape)).astype(
        dtype
    )


# ------------------------------------------------------------------ arrays


@kind("npy: arrays, each a sample")
def npy_arrays(folder: Path) -> str:
    for n in range(20):
        np.save(folder / f"{n:02d}.npy", noise(64, 32))
    return f"{folder}/*.npy"


@kind("npy: rows")
def npy_rows(folder: Path) -> str:
    np.save(folder / "x.npy", noise(60, 28, 28))
    return f"{folder}/x.npy"


@kind("npy: channels x time")
def npy_channels_time(folder: Path) -> str:
    for n in range(3):
        np.save(folder / f"{n}.npy", noise(20_000, 16, dtype="i2").T.copy())
    return f"{folder}/*.npy"


@kind("npy: time x channels")
def npy_time_channels(folder: Path) -> str:
    np.save(folder / "x.npy", noise(20_000, 16, dtype="i2"))
    return f"{folder}/x.npy"


@kind("npy: Fortran order")
def npy_fortran(folder: Path) -> str:
    np.save(folder / "x.npy", np.asfortranarray(noise(20_000, 16, dtype="i2")))
    return f"{folder}/x.npy"


@kind("npz")
def npz(folder: Path) -> str:
    np.savez(folder / "train.npz", x=noise(40, 8, 8), y=np.arange(40))
    return f"{folder}/*.npz"


@kind("raw: .dat, int16")
def raw_dat(folder: Path) -> str:
    noise(20_000, 4, dtype="<i2").tofile(folder / "a.dat")
    return f"{folder}/*.dat"


@kind("raw: .bin, big-endian float32")
def raw_big_endian(folder: Path) -> str:
    noise(20_000, dtype=">f4").tofile(folder / "a.bin")
    return f"{folder}/*.bin"


@kind("raw: .f32")
def raw_f32(folder: Path) -> str:
    noise(20_000).tofile(folder / "a.f32")
    return f"{folder}/*.f32"


# ------------------------------------------------------------------ HDF5 and its relatives


@kind("hdf5: one dataset")
def hdf5_one(folder: Path) -> str:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file["signal"] = noise(20_000, 8)
    return f"{folder}/*.h5"


@kind("hdf5: several datasets")
def hdf5_several(folder: Path) -> str:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file["images"], file["labels"] = noise(50, 16, 16, 3), np.arange(50)
        file["mean"] = noise(16, 16)
    return f"{folder}/*.h5"


@kind("hdf5: a group for each sample")
def hdf5_groups(folder: Path) -> str:
    import h5py

    with h5py.File(folder / "demos.hdf5", "w") as file:
        for n in range(12):
            file[f"data/demo_{n}/obs/image"] = noise(5 + n, 8, 8)
            file[f"data/demo_{n}/actions"] = noise(5 + n, 7)
    return f"{folder}/*.hdf5"


@kind("MATLAB v7.3")
def matlab_73(folder: Path) -> str:
    import h5py

    with h5py.File(folder / "a.mat", "w", userblock_size=512) as file:
        file["eeg"] = noise(20_000, 16, dtype="f8")  # 16 x 20000 in MATLAB
        file["eeg"].attrs["MATLAB_class"] = np.bytes_("double")
        file["fs"] = np.full((1, 1), 250.0)
        file["#refs#/a"] = np.zeros((1, 1))
    with (folder / "a.mat").open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM")
    return f"{folder}/*.mat"


@kind("MATLAB v5", slow=True)
def matlab_5(folder: Path) -> str:
    from scipy.io import savemat

    for n in range(3):
        savemat(folder / f"{n}.mat", {"eeg": noise(16, 200, dtype="f8"), "fs": 250.0})
    return f"{folder}/*.mat"


@kind("NetCDF-4, packed", slow=True)
def netcdf_4(folder: Path) -> str:
    import xarray

    values = noise(48, 20, 30)
    made = xarray.Dataset(
        {"t2m": (("time", "lat", "lon"), values)},
        {"time": np.arange(48.0), "lat": np.arange(20.0), "lon": np.arange(30.0)},
    )
    packed = {"dtype": "i2", "scale_factor": 0.1, "add_offset": 10.0, "_FillValue": -9999}
    made.to_netcdf(folder / "era.nc", engine="netcdf4", encoding={"t2m": packed})
    return f"{folder}/*.nc"


@kind("NetCDF-3", slow=True)
def netcdf_3(folder: Path) -> str:
    from scipy.io import netcdf_file

    with netcdf_file(folder / "a.nc", "w") as file:
        file.createDimension("time", 30)
        file.createVariable("t", "f4", ("time",))[:] = noise(30)
    return f"{folder}/*.nc"


@kind("NWB", slow=True)
def nwb(folder: Path) -> str:
    from datetime import UTC, datetime

    from pynwb import NWBHDF5IO, NWBFile
    from pynwb.ecephys import ElectricalSeries

    made = NWBFile("a session", "id", datetime(2025, 1, 1, tzinfo=UTC))
    group = made.create_electrode_group("g", "a", "b", made.create_device("d"))
    for _ in range(8):
        made.add_electrode(location="x", group=group)
    region = made.create_electrode_table_region(list(range(8)), "all")
    data = noise(20_000, 8, dtype="i2")
    series = ElectricalSeries("ElectricalSeries", data, region, rate=1000.0, conversion=1e-6)
    made.add_acquisition(series)
    with NWBHDF5IO(folder / "sub-1_ecephys.nwb", "w") as io:
        io.write(made)
    return f"{folder}/*.nwb"


def cells(folder: Path, matrix: Any, *, zarr: bool = False) -> str:
    import anndata
    import pandas

    with pandas.option_context("future.infer_string", False):
        names = pandas.Index([f"c{n}" for n in range(60)])
        genes = pandas.DataFrame(index=pandas.Index([f"g{n}" for n in range(200)]))
        types = pandas.Categorical(["a", "b"] * 30)
        made = anndata.AnnData(matrix, pandas.DataFrame({"cell_type": types}, names), genes)
        if zarr:
            made.write_zarr(folder / "cells.zarr")
            return f"{folder}/cells.zarr"
        made.write_h5ad(folder / "cells.h5ad")
    return f"{folder}/*.h5ad"


@kind("AnnData, dense", slow=True)
def anndata_dense(folder: Path) -> str:
    return cells(folder, noise(60, 200))


def sparse() -> Any:
    from scipy.sparse import csr_matrix

    return csr_matrix(np.random.default_rng(0).poisson(0.1, (60, 200)).astype("f4"))


@kind("AnnData, sparse", slow=True)
def anndata_sparse(folder: Path) -> str:
    return cells(folder, sparse())


@kind("AnnData, sparse, Zarr", slow=True)
def anndata_zarr(folder: Path) -> str:
    return cells(folder, sparse(), zarr=True)


# ------------------------------------------------------------------ Zarr


def zarr_store(folder: Path, version: int) -> str:
    import zarr

    group = zarr.open_group(str(folder / "a.zarr"), mode="w", zarr_format=version)  # type: ignore[arg-type]
    for name, values, rows in (("x", noise(2000, 16), 100), ("y", np.arange(2000), 500)):
        chunks = (rows, *values.shape[1:])
        group.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype)
        group[name][:] = values  # type: ignore[index]
    return f"{folder}/a.zarr"


@kind("Zarr v2: a store")
def zarr_v2(folder: Path) -> str:
    return zarr_store(folder, 2)


@kind("Zarr v3: a store")
def zarr_v3(folder: Path) -> str:
    return zarr_store(folder, 3)


@kind("OME-Zarr", slow=True)
def ome_zarr(folder: Path) -> str:
    import zarr
    from ome_zarr.io import parse_url
    from ome_zarr.writer import write_image

    place = parse_url(folder / "image.zarr", mode="w")
    assert place is not None
    image = noise(1, 2, 8, 64, 64, dtype="u2")
    write_image(
        image,
        zarr.group(place.store),
        axes="tczyx",
        storage_options={"chunks": (1, 1, 1, 32, 32)},
    )
    return f"{folder}/image.zarr"


# ------------------------------------------------------------------ tables and records


def table() -> Any:
    import pyarrow as pa

    return pa.table({"x": np.arange(300.0), "label": np.arange(300) % 3})


@kind("Parquet")
def parquet(folder: Path) -> str:
    import pyarrow.parquet as pq

    pq.write_table(table(), folder / "a.parquet")
    return f"{folder}/*.parquet"


@kind("Parquet: hive folders")
def parquet_hive(folder: Path) -> str:
    import pyarrow.parquet as pq

    pq.write_to_dataset(table(), folder / "t", partition_cols=["label"])
    return f"{folder}/t"


@kind("Parquet: Spark's output")
def parquet_spark(folder: Path) -> str:
    import pyarrow.parquet as pq

    (folder / "out").mkdir()
    for n in range(2):
        name = f"part-0000{n}-c000.snappy.parquet"
        pq.write_table(table(), folder / "out" / name)
        (folder / "out" / f".{name}.crc").write_bytes(b"crc\0" * 4)
    (folder / "out" / "_SUCCESS").touch()
    return f"{folder}/out"


LINES = b"".join(b'{"text": "line %d", "label": %d}\n' % (n, n % 3) for n in range(200))


@kind("JSON Lines")
def jsonl(folder: Path) -> str:
    (folder / "a.jsonl").write_bytes(LINES)
    return f"{folder}/*.jsonl"


@kind("JSON Lines, gzip")
def jsonl_gz(folder: Path) -> str:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    return f"{folder}/*.jsonl.gz"


@kind("CSV: recordings")
def csv_recordings(folder: Path) -> str:
    for n in range(3):
        rows = "".join(f"{t},{t / 2},{t / 3}\n" for t in range(100))
        (folder / f"{n}.csv").write_text(f"time,x,y\n{rows}")
    return f"{folder}/*.csv"


@kind("TSV: a table")
def tsv(folder: Path) -> str:
    rows = "".join(f"sub-{n}\t{n % 2}\n" for n in range(50))
    (folder / "participants.tsv").write_text(f"participant_id\tgroup\n{rows}")
    return f"{folder}/participants.tsv"


@kind("text with a byte order mark")
def text_with_bom(folder: Path) -> str:
    (folder / "a.txt").write_text("\ufeffeine Zeile\nnoch eine, mit Umlaut: ü\n" * 50, "utf-8")
    return f"{folder}/*.txt"


def tfrecords() -> bytes:
    from tests.formats.test_tfrecord import example, file

    return file([example({"x": [1.0] * 50, "label": [n % 3]}) for n in range(40)])


@kind("TFRecord")
def tfrecord(folder: Path) -> str:
    (folder / "a.tfrecord").write_bytes(tfrecords())
    return f"{folder}/*.tfrecord"


@kind("TFRecord, gzip")
def tfrecord_gzip(folder: Path) -> str:
    (folder / "a.tfrecord").write_bytes(gzip.compress(tfrecords()))
    return f"{folder}/*.tfrecord"


@kind("TFRecord, zlib")
def tfrecord_zlib(folder: Path) -> str:
    (folder / "a.tfrecord").write_bytes(zlib.compress(tfrecords()))
    return f"{folder}/*.tfrecord"


@kind("WebDataset")
def webdataset(folder: Path) -> str:
    import io
    import tarfile

    for shard in range(2):
        with tarfile.open(folder / f"train-{shard:04d}.tar", "w") as archive:
            for n in range(10):
                members = {"jpg": encoded(n), "cls": str(n % 3).encode()}
                members["json"] = json.dumps({"caption": "a pet"}).encode()
                for ending, data in members.items():
                    info = tarfile.TarInfo(f"{shard}{n:03d}.{ending}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    return f"{folder}/train-*.tar"


@kind("LMDB: a folder")
def lmdb_folder(folder: Path) -> str:
    import lmdb

    with lmdb.open(str(folder / "db"), map_size=1 << 22) as env, env.begin(write=True) as txn:
        for n in range(100):
            txn.put(b"%04d" % n, b"value" * 100)
    return f"{folder}/db"


# ------------------------------------------------------------------ images


def encoded(n: int, kind: str = "JPEG") -> bytes:
    import io

    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (32, 24), (n % 256, 50, 99)).save(data, kind)
    return data.getvalue()


@kind("images in class folders")
def images_in_folders(folder: Path) -> str:
    for name in ("cat", "dog"):
        (folder / "pets" / name).mkdir(parents=True)
        for n in range(5):
            (folder / "pets" / name / f"{n}.jpg").write_bytes(encoded(n))
        (folder / "pets" / name / ".DS_Store").write_bytes(bytes(8))
    return f"{folder}/pets"


@kind("images in one folder")
def images_flat(folder: Path) -> str:
    for n in range(5):
        (folder / f"{n}.png").write_bytes(encoded(n, "PNG"))
    return f"{folder}/*.png"


@kind("TIFF", slow=True)
def tiff(folder: Path) -> str:
    import tifffile

    for n in range(3):
        tifffile.imwrite(folder / f"{n}.tif", noise(64, 64, dtype="u2"), tile=(32, 32))
    return f"{folder}/*.tif"


# ------------------------------------------------------------------ recordings and scans


def edf_like(path: Path, filetype: str) -> None:
    import pyedflib

    kind = getattr(pyedflib, f"FILETYPE_{filetype}")
    with pyedflib.EdfWriter(str(path), 4, file_type=kind) as writer:
        for n in range(4):
            header = {"label": f"EEG {n}", "sample_frequency": 250, "dimension": "uV"}
            header |= {"physical_min": -1e3, "physical_max": 1e3}
            writer.setSignalHeader(n, header)
        writer.writeSamples([noise(10_000, dtype="f8") for _ in range(4)])


@kind("EDF", slow=True)
def edf(folder: Path) -> str:
    for subject in ("sub-01", "sub-02", "sub-03"):
        (folder / subject).mkdir()
        edf_like(folder / subject / f"{subject}_rest.edf", "EDFPLUS")
    return f"{folder}/**/*.edf"


@kind("BDF", slow=True)
def bdf(folder: Path) -> str:
    edf_like(folder / "a.bdf", "BDF")
    return f"{folder}/*.bdf"


def nifti_like(folder: Path, ending: str) -> str:
    import nibabel

    for n in range(3):
        image = nibabel.Nifti1Image(noise(32, 32, 8, dtype="i2"), np.eye(4))
        nibabel.save(image, folder / f"{n}_T1w{ending}")
    return f"{folder}/*{ending}"


@kind("NIfTI", slow=True)
def nifti(folder: Path) -> str:
    return nifti_like(folder, ".nii")


@kind("NIfTI, gzip", slow=True)
def nifti_gz(folder: Path) -> str:
    return nifti_like(folder, ".nii.gz")


@kind("DICOM", slow=True)
def dicom(folder: Path) -> str:
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    for n in range(3):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        made = FileDataset(str(folder / f"{n}.dcm"), {}, file_meta=meta, preamble=bytes(128))
        made.SOPClassUID, made.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
        made.PatientID, made.Rows, made.Columns = f"p{n}", 16, 16
        made.BitsAllocated = made.BitsStored = 16
        made.HighBit, made.PixelRepresentation, made.SamplesPerPixel = 15, 0, 1
        made.PhotometricInterpretation = "MONOCHROME2"
        made.PixelData = noise(16, 16, dtype="u2").tobytes()
        made.save_as(folder / f"{n}.dcm", enforce_file_format=True)
    return f"{folder}/*.dcm"


@kind("FITS", slow=True)
def fits(folder: Path) -> str:
    from astropy.io import fits

    for n in range(3):
        fits.PrimaryHDU(noise(32, 32)).writeto(folder / f"{n}.fits")
    return f"{folder}/*.fits"


def audio_like(folder: Path, ending: str) -> str:
    import soundfile

    for n in range(2):
        soundfile.write(folder / f"{n}{ending}", noise(40_000) / 1000, 16_000)
    return f"{folder}/*{ending}"


@kind("WAV", slow=True)
def wav(folder: Path) -> str:
    return audio_like(folder, ".wav")


@kind("FLAC", slow=True)
def flac(folder: Path) -> str:
    return audio_like(folder, ".flac")
