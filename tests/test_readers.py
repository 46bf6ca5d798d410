"""Functions that read MAT-files and NetCDF 3 whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from growcache.errors import FormatError
from growcache.formats.signatures import advice_on
from growcache.readers import mat, netcdf3

scipy_io = pytest.importorskip("scipy.io")
X = np.arange(12, dtype=np.int16).reshape(3, 4)


class Opened:
    def __init__(self, path: Path) -> None:
        self.key, self._path = path.name, path

    def open(self) -> BinaryIO:
        return self._path.open("rb")


@pytest.fixture
def mat_file(tmp_path: Path) -> Opened:
    held = {"x": X, "y": X * 0.5, "n": 3, "text": "é", "struct": {"a": 1}}
    scipy_io.savemat(tmp_path / "a.mat", held, do_compression=True)
    return Opened(tmp_path / "a.mat")


@pytest.fixture
def netcdf_file(tmp_path: Path) -> Opened:
    with scipy_io.netcdf_file(tmp_path / "a.nc", "w") as file:
        file.createDimension("time", None)
        file.createDimension("x", 4)
        packed = file.createVariable("packed", "i2", ("time", "x"))
        packed[:] = X
        packed.scale_factor, packed.add_offset, packed._FillValue = 0.5, 1.0, np.int16(5)
        file.createVariable("time", "f8", ("time",))[:] = [1, 2, 3]
    return Opened(tmp_path / "a.nc")


def test_cells_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says how large they are: 500 kB took 700 MB."""
    cell = np.empty((1, 1), object)
    cell[0, 0] = X
    scipy_io.savemat(tmp_path / "a.mat", {"x": X, "cell": cell})
    read: list[list[str]] = []
    loaded = scipy_io.loadmat

    def loadmat(*args: Any, variable_names: list[str], **more: Any) -> Any:
        read.append(variable_names)
        return loaded(*args, variable_names=variable_names, **more)

    monkeypatch.setattr("scipy.io.loadmat", loadmat)
    assert [list(one) for one in mat(Opened(tmp_path / "a.mat"))] == [["x"]]
    with pytest.raises(FormatError, match="cell is neither an array"):
        list(mat(Opened(tmp_path / "a.mat"), ["cell"]))
    assert read == [["x"], []]


def test_a_mat_file_is_a_sample(mat_file: Opened) -> None:
    (found,) = mat(mat_file)
    assert sorted(found) == ["n", "text", "x", "y"]
    assert (int(found["n"]), found["n"].shape, found["text"]) == (3, (), "é")
    np.testing.assert_array_equal(found["x"], X)
    assert found["x"].dtype == np.int16


def test_windows_of_a_mat_file(mat_file: Opened) -> None:
    found = list(mat(mat_file, variables=["x", "y", "n"], axis=1, window=2))
    assert [one["x"].tolist() for one in found] == [X[:, :2].tolist(), X[:, 2:].tolist()]
    assert [int(one["n"]) for one in found] == [3, 3]
    assert [one["x"].tolist() for one in mat(mat_file, ["x"], axis=0)] == X.tolist()


def test_variables_of_netcdf(netcdf_file: Opened) -> None:
    (found,) = netcdf3(netcdf_file)
    np.testing.assert_array_equal(found["packed"], X)
    scaled = [one["packed"].tolist() for one in netcdf3(netcdf_file, axis=0, scale=True)]
    expected = np.where(X == 5, np.nan, X * 0.5 + 1)
    np.testing.assert_array_equal(scaled, expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variables": ["z"]}, "expected a variable 'z', found n, struct, text, x, y"),
        ({"variables": ["struct"]}, "struct is neither an array of numbers nor text"),
        ({"axis": 2}, "not all of x, y have an axis 2"),
    ],
)
def test_what_a_mat_file_has_not(mat_file: Opened, options: Any, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        list(mat(mat_file, **options))


def test_known_files_get_advice() -> None:
    for head, words in (
        (b"CDF\x01", "growcache.readers:netcdf3"),
        (b"CDF\x05", "nccopy -k nc4"),
        (b"MATLAB 5.0 MAT-file, Plat", "growcache.readers:mat"),
        (b"version https://git-lfs", "git lfs pull"),
    ):
        assert words in advice_on(head)
    assert advice_on(b"abc") == ""
