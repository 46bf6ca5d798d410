"""Cells by genes that anndata writes, dense and as CSR, in h5ad files and Zarr."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.matrix.case import Case, Place, Values

CELLS, GENES = 90, 40


def cells(kind: str) -> Any:
    import anndata
    import pandas as pd
    import scipy.sparse

    rng = np.random.default_rng(0)
    dense = np.where(rng.random((CELLS, GENES)) < 0.1, rng.integers(1, 90, (CELLS, GENES)), 0)
    dense[[1, 40]] = 0
    values = dense.astype("f4")
    matrix = {
        "csr": scipy.sparse.csr_matrix,
        "csc": scipy.sparse.csc_matrix,
        "dense": lambda given: given,
    }[kind](values)
    pd.options.future.infer_string = False  # anndata cannot write the text of pandas 3
    types = pd.Categorical.from_codes(np.arange(CELLS) % 3, ["a", "b", "c"])
    index = [f"cell {n}" for n in range(CELLS)]
    return anndata.AnnData(matrix, obs=pd.DataFrame({"type": types}, index=index))


def write(folder: Path, kind: str, store: str) -> None:
    given = cells(kind)
    if store == "h5ad":
        given.write_h5ad(folder / "a.h5ad", compression="gzip")
    else:
        import anndata

        anndata.settings.zarr_write_format = int(store)
        given.write_zarr(folder / "a.zarr", chunks=(16, GENES) if kind == "dense" else None)


def cell(place: Place, ragged: bool) -> Values:
    import anndata

    path = next((one for one in place.path.parents if one.suffix == ".zarr"), place.path)
    read = anndata.read_zarr if path.suffix == ".zarr" else anndata.read_h5ad
    found = read(path)
    row = found.X[place.start]
    label = {"y": np.asarray(found.obs["type"].cat.codes)[place.start]}
    if ragged:
        return {"x.indices": row.indices, "x.data": row.data, **label}
    return {"x": row.toarray()[0] if hasattr(row, "toarray") else row, **label}


def _case(store: str, kind: str, refused: str = "", **options: Any) -> Case:
    in_file = store == "h5ad"
    return Case(
        "anndata.write_h5ad" if in_file else f"anndata.write_zarr, version {store}",
        kind,
        "hdf5" if in_file else "zarr",
        partial(write, kind=kind, store=store),
        None if refused else partial(cell, ragged=options.get("sparse") == "ragged"),
        CELLS,
        {"datasets": {"x": "X", "y": "obs/type/codes"}, "axis": 0, **options},
        url="a.h5ad" if in_file else "a.zarr/**",
        needs=("anndata", "scipy", "h5py" if in_file else "zarr"),
        refused=refused,
    )


CASES = [
    *(_case(store, kind) for store in ("h5ad", "2", "3") for kind in ("csr", "dense")),
    *(_case(store, "csr", sparse="ragged") for store in ("h5ad", "2", "3")),
    _case("h5ad", "csc", refused="adata.X.tocsr()"),
    _case("2", "csc", refused="adata.X.tocsr()"),
]
