"""Files that are not read: the last line of `growcache run` says which they are, and what to do."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case

READER = "tests.matrix.cases_refused:read_pickle"


class Opaque:
    """What no reader of untrusted pickles makes."""


def read_pickle(object: Any) -> Any:
    import growcache

    yield growcache.unpickle_arrays(object.read())


def write_netcdf3(folder: Path) -> None:
    with import_module("scipy.io").netcdf_file(folder / "a.nc", "w") as file:
        file.createDimension("t", 5)
        file.createVariable("x", "f4", ("t",))[:] = 1


def write_mat5(folder: Path) -> None:
    import_module("scipy.io").savemat(folder / "a.mat", {"eeg": np.zeros((4, 100))})


def write_objects(folder: Path) -> None:
    np.save(folder / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)


def write_archive_of_objects(folder: Path) -> None:
    objects = np.array([{"a": 1}], dtype=object)
    np.savez(folder / "a.npz", allow_pickle=True, x=np.arange(3), o=objects)


def write_pickle(folder: Path) -> None:
    (folder / "a.pkl").write_bytes(pickle.dumps({"x": np.arange(3), "o": Opaque()}))


def write_dotted(folder: Path) -> None:
    for i in range(3):
        with tarfile.open(folder / f"{i}.tar", "w") as archive:
            for j in range(12):
                for extension in ("jpg", "cls"):
                    info = tarfile.TarInfo(f"img.v1.{i}{j:02}.{extension}")
                    info.size = 1
                    archive.addfile(info, BytesIO(b"1"))


def write_encrypted(folder: Path, *, plaintext_footer: bool) -> None:
    pa, pq, pe = (
        import_module(f"pyarrow{name}") for name in ("", ".parquet", ".parquet.encryption")
    )

    class Keys(pe.KmsClient):  # type: ignore[name-defined, misc]
        def wrap_key(self, key: bytes, _: str) -> str:
            return key.hex()

        def unwrap_key(self, wrapped: str, _: str) -> bytes:
            return bytes.fromhex(wrapped)

    wanted = pe.EncryptionConfiguration(
        footer_key="f", column_keys={"k": ["x"]}, plaintext_footer=plaintext_footer
    )
    how = pe.CryptoFactory(lambda _: Keys()).file_encryption_properties(
        pe.KmsConnectionConfig(), wanted
    )
    table = pa.table({"x": [1, 2], "y": [3, 4]})
    with pq.ParquetWriter(
        folder / "a.parquet", table.schema, encryption_properties=how
    ) as file:
        file.write_table(table)


def write_encrypted_columns(folder: Path) -> None:
    write_encrypted(folder, plaintext_footer=True)


def write_encrypted_footer(folder: Path) -> None:
    write_encrypted(folder, plaintext_footer=False)


def _refused(
    writer: str, holds: str, form: str, write: Callable[[Path], None], words: str,
    *needs: str, **options: Any,
) -> Case:  # fmt: skip
    return Case(writer, holds, form, write, options=options, needs=needs, refused=words)


_PICKLED = "calls numpy.load(object.open(), allow_pickle=True)"
CASES = [
    _refused("scipy.io.netcdf_file", "NetCDF 3", "hdf5", write_netcdf3,
             '"growcache.readers:netcdf3", which reads it whole with SciPy', "scipy", "h5py"),
    _refused("scipy.io.netcdf_file", "NetCDF 3 ", "npy", write_netcdf3, "`nccopy -k nc4 IN OUT`", "scipy"),
    _refused("scipy.io.savemat", "MAT 5", "hdf5", write_mat5,
             '"growcache.readers:mat", which reads it whole with scipy.io.loadmat', "scipy", "h5py"),
    _refused("numpy.save", "Python objects", "npy", write_objects, _PICKLED),
    _refused("numpy.savez", "Python objects", "npz", write_archive_of_objects, _PICKLED),
    _refused("pickle.dump", "an object of a class", READER, write_pickle,
             "call pickle.loads in a function of your own"),
    _refused("tarfile", "names with dots", "tar", write_dotted,
             "WebDataset ends a sample's name at the first dot"),
    _refused("pyarrow.parquet.encryption", "an encrypted column", "parquet", write_encrypted_columns,
             "it is encrypted, and growcache takes no keys", "pyarrow"),
    _refused("pyarrow.parquet.encryption", "an encrypted footer", "parquet", write_encrypted_footer,
             "it is encrypted, and growcache takes no keys", "pyarrow"),
]  # fmt: skip
