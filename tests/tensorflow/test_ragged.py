"""TensorFlow over ragged caches: what was written comes, as ragged or padded tensors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import growcache.tensorflow as gtf
from growcache.errors import ConfigError
from growcache.schema import Schema
from tests.filled import Filled
from tests.ragged import SCHEMAS, ragged_cache

pytestmark = pytest.mark.tensorflow

KINDS: dict[str, Any] = {
    **{name: declared["x"] for name, declared in SCHEMAS.items()},
    "bools": ["bool", None],
    "wide": ["uint64", None, 2],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """One cache with a field of every kind: TensorFlow takes a second to trace a pipeline."""
    with ragged_cache(tmp_path_factory.mktemp("ragged") / "cache", KINDS) as filled:
        filled.add(0, 1, 2)
        yield filled


def expected_of(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.encode() if isinstance(value, str) else value


def test_ragged_tensors_hold_what_was_written(cache: Filled) -> None:
    seen = []
    for batch in gtf.dataset(cache.root, batch_size=7, min_samples=1, drop_last=False):
        for i, name in enumerate(batch["id"].numpy().tolist()):
            sample = cache.make(name)
            for kind in KINDS:
                found = batch[kind][i]
                found = found.to_list() if isinstance(found, tf.RaggedTensor) else found.numpy()
                found = found.tolist() if isinstance(found, np.ndarray) else found
                assert found == expected_of(sample[kind]), kind
        seen += batch["id"].numpy().tolist()
    assert sorted(seen) == sorted(1000 * n + i for n in range(3) for i in range(10))
    assert isinstance(batch["rows"], tf.RaggedTensor)
    assert batch["rows"].shape.as_list() == [len(batch["id"]), None, 3]
    assert batch["str"].dtype == batch["bytes"].dtype == tf.string
    for kind, (dtype, *_) in ((k, d) for k, d in KINDS.items() if isinstance(d, list)):
        assert batch[kind].dtype == tf.as_dtype(dtype)


def test_padded_tensors_and_their_lengths(cache: Filled) -> None:
    names = [kind for kind in KINDS if kind not in ("str", "bytes", "fixed")]
    dataset = gtf.dataset(cache.root, batch_size=7, min_samples=1, ragged="pad")
    for batch in dataset:
        for kind in names:
            field, x, lengths = cache.schema[kind], batch[kind], batch[f"{kind}_lengths"]
            assert lengths.dtype == tf.int64
            sizes = lengths.numpy().reshape(7, -1)
            longest = field.shape_of(sizes.max(axis=0).tolist())
            assert x.shape.as_list() == [7, *longest]
            for i, name in enumerate(batch["id"].numpy().tolist()):
                value = x[i].numpy()[tuple(map(slice, field.shape_of(sizes[i].tolist())))]
                np.testing.assert_array_equal(value, cache.make(name)[kind])
                assert np.count_nonzero(x[i]) == np.count_nonzero(value)


def test_fields_and_tuples_of_lengths(cache: Filled) -> None:
    only = gtf.dataset(cache.root, batch_size=5, min_samples=1, fields=["rows", "id"])
    assert sorted(only.element_spec) == ["id", "rows"]
    padded = gtf.dataset(
        cache.root, batch_size=5, min_samples=1, ragged="pad", as_tuple=("rows_lengths", "rows")
    )
    lengths, rows = next(iter(padded))
    assert rows.shape[1] == lengths.numpy().max()
    with pytest.raises(ConfigError, match=r"fields: no field 'row'.*did you mean 'rows'"):
        gtf.dataset(cache.root, batch_size=5, fields=["row"])
    with pytest.raises(ConfigError, match="ragged must be offsets or pad"):
        gtf.dataset(cache.root, batch_size=5, ragged="list")  # type: ignore[arg-type]


def test_native_reading_of_another_format_is_refused(tmp_path: Path) -> None:
    with ragged_cache(tmp_path / "cache", {"x": "bytes"}, "npy") as cache:
        cache.add(0)
        with pytest.raises(ConfigError, match=r'of format npy; use reader="gather"'):
            gtf.dataset(cache.root, batch_size=5)


def test_images_are_decoded_by_tensorflow_in_map(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")

    def sample(name: int) -> dict[str, Any]:
        file = io.BytesIO()
        image.new("RGB", (30 + name, 20), (10 * name, 100, 200)).save(file, "JPEG", quality=95)
        return {"id": np.array(name), "image": file.getvalue()}

    def decode(batch: Any) -> Any:
        def one(data: Any) -> Any:
            return tf.image.resize(tf.io.decode_jpeg(data, channels=3), (8, 8))

        return {
            **batch,
            "image": tf.map_fn(one, batch["image"], fn_output_signature=tf.float32),
        }

    schema = Schema.declared({"id": ["int64"], "image": "bytes"})
    with Filled(tmp_path / "cache", sample, schema=schema) as cache:
        cache.add(0)
        [batch] = gtf.dataset(cache.root, batch_size=10, min_samples=1).map(decode)
    assert batch["image"].shape == (10, 8, 8, 3)
    for name, pixels in zip(batch["id"].numpy(), batch["image"].numpy(), strict=True):
        np.testing.assert_allclose(pixels.mean((0, 1)), (10 * name, 100, 200), atol=4)
