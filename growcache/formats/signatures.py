"""Name the kind of an object that a format refuses, and how to read it."""

from __future__ import annotations

SIGNATURE_BYTES = 20  # at the start of an object, from which its kind is known
_NETCDF3 = (
    "it is a NetCDF file of version 3, which is read by its own function only: set source.format: "
    '"growcache.readers:netcdf3", which reads it whole with SciPy; or convert the files with '
    '`nccopy -k nc4 IN OUT`, or with xarray\'s to_netcdf(OUT, format="NETCDF4"), for hdf5'
)
_NETCDF5 = (
    "it is a NetCDF file in the 64-bit data format (CDF-5), which cannot be read: convert the files "
    "with `nccopy -k nc4 IN OUT` for source.format: hdf5"
)
_MAT5 = (
    "it is a MAT-file of version 5, which is not HDF5: set source.format: "
    '"growcache.readers:mat", which reads it whole with scipy.io.loadmat; or save it with -v7.3 in '
    "MATLAB, for hdf5"
)
_KNOWN = (
    (b"CDF\x01", _NETCDF3),
    (b"CDF\x02", _NETCDF3),
    (b"CDF\x05", _NETCDF5),
    (b"MATLAB 5.0 MAT-file", _MAT5),
    (b"\x89HDF\r\n\x1a\n", "it is an HDF5 file; see source.format: hdf5"),
    (b"MATLAB 7.3 MAT-file", "it is a MAT-file of version 7.3; see source.format: hdf5"),
    (b"\x93NUMPY", "it is an .npy file; see source.format: npy"),
    (b"PK\x03\x04", "it is a zip archive; see source.format: npz, if NumPy wrote it"),
    (b"PAR1", "it is a Parquet file; see source.format: parquet"),
    (b"SIMPLE  =", "it is a FITS file; see source.format: fits"),
    (b"II*\0", "it is a TIFF file; see source.format: tiff"),
    (b"MM\0*", "it is a TIFF file; see source.format: tiff"),
    (b"\x89PNG", "it is a PNG image; see source.format: image"),
    (b"\xff\xd8\xff", "it is a JPEG image; see source.format: image"),
    (b"\x80\x04\x95", "it is a pickle; see growcache.unpickle_arrays, in a function of yours"),
    (b"<?xml", "it is XML, maybe an error message of the store"),
    (b"<!DOCTYPE", "it is a web page, maybe an error message of the store"),
    (b"<html", "it is a web page, maybe an error message of the store"),
    (b"version https://git", "it is a pointer of Git LFS, without the content; run git lfs pull"),
)  # fmt: skip


def advice_on(head: bytes) -> str:
    r"""Return a hint about files that start like this, to append to a message; "" if unknown.

    >>> advice_on(b"\x89HDF\r\n\x1a\n" + bytes(20)), advice_on(b"text")
    ('; it is an HDF5 file; see source.format: hdf5', '')
    """
    return next(("; " + advice for start, advice in _KNOWN if head.startswith(start)), "")
