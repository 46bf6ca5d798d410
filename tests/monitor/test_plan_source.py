"""A look at sources of every kind: what there is to draw, and what a visit brings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from growcache.config_text import load_config
from growcache.errors import SamplingError
from growcache.monitor.plan import plan
from growcache.monitor.plan_inputs import Given, inputs_of, look_at_machine
from growcache.monitor.plan_source import Look, look_at_source

CODE = """
import numpy as np

def draw(store, rng):
    return {"x": rng.random(32).astype("<f4")}

class Numbers:
    def __len__(self):
        return 50
    def __getitem__(self, i):
        return {"x": np.full(32, i, "<f4")}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plan_source.py").write_text(CODE)
    for folder, count in (("a", 4), ("b", 12)):
        (tmp_path / folder).mkdir()
        for i in range(count):
            rows = np.random.default_rng(i).normal(size=(16, 32)).astype("<f4")
            np.save(tmp_path / folder / f"{i}.npy", rows)
    return tmp_path


def look(here: Path, source: Any, **sections: Any) -> Look:
    values = {"source": source, "cache": {"path": str(here / "cache"), "max_bytes": "4MB"}}
    return look_at_source(load_config({**values, **sections}))


def rows(here: Path, folder: str = "*") -> dict[str, Any]:
    return {"url": f"{here}/{folder}/*.npy", "options": {"axis": 0}}


def test_all_parts_of_a_listing(here: Path) -> None:
    found = look(here, rows(here), sampling={"samples_per_object": 4})
    assert found.is_whole
    assert found.objects == 16
    assert found.population_samples == 16 * 16
    assert found.parts.total == 16 * 4
    assert found.samples_of_visit == 4
    assert found.sample_bytes == 32 * 4
    assert found.timings.nbytes >= found.timings.samples * 32 * 4


def test_strata_are_drawn_by_their_shares(here: Path) -> None:
    strata = {"by": "(?P<stratum>[ab])/[0-9]+.npy", "weights": "balanced"}
    found = look(here, rows(here), sampling={"strata": strata, "samples_per_object": 1})
    assert sorted(found.parts.counts) == [4 * 16, 12 * 16]
    assert found.parts.shares == pytest.approx((0.5, 0.5), abs=0.01)
    assert found.parts.until_complete == pytest.approx(2 * 12 * 16, rel=0.02)


def test_strata_by_a_column_of_labels(here: Path) -> None:
    lines = [f"{one.relative_to(here)},{one.parent.name}" for one in here.glob("*/*.npy")]
    (here / "labels.csv").write_text("\n".join(["path,kind", *lines]))
    labels = {"url": f"{here}/labels.csv", "key": "path", "columns": ["kind"]}
    sampling = {"strata": {"by": "kind"}, "samples_per_object": 1}
    found = look(here, {**rows(here), "labels": labels}, sampling=sampling)
    assert sorted(found.parts.counts) == [4 * 16, 12 * 16]
    assert "kind" in [field.name for field in found.schema.fields]


def test_sources_are_mixed_by_their_weights(here: Path) -> None:
    mixed = [{**rows(here, "a"), "weight": 3}, {**rows(here, "b"), "weight": 1}]
    found = look(here, mixed)
    assert found.parts.shares == pytest.approx((0.75, 0.25), abs=0.01)


def test_a_node_draws_its_lanes(here: Path) -> None:
    both = [
        look(here, rows(here), sampling={"node": node, "nodes": 2, "samples_per_object": 1})
        for node in (0, 1)
    ]
    assert sum(one.parts.total for one in both) == 16 * 16
    assert both[0].parts.coverage(both[0].parts.total) == pytest.approx(
        both[0].parts.total / (16 * 16)
    )


def test_a_function_draws_for_ever(here: Path) -> None:
    found = look(here, {"url": f"{here}/a/*.npy", "format": "my_plan_source:draw"})
    assert found.is_endless
    assert found.parts.coverage(1e9) is None
    config = load_config(
        {"source": {"url": f"{here}/a/*.npy", "format": "my_plan_source:draw"}}
    )
    inputs = inputs_of(config, found, look_at_machine(config, Given(consume=10)), Given())
    assert inputs.population_samples.value == math.inf


def test_a_dataset_is_a_source(here: Path) -> None:
    source = {"dataset": "my_plan_source:Numbers"}
    found = look(here, source)
    assert found.population_samples == 50
    assert found.samples_of_visit == 1
    config = load_config({"source": source, "cache": {"path": str(here / "cache")}})
    given = Given(consume=10, horizon_seconds=60)
    outcome = plan(inputs_of(config, found, look_at_machine(config, given), given))
    assert outcome["coverage"].value == 1
    assert outcome["egress_bytes_per_hour"].value is None  # its reads are not seen


def test_an_empty_listing_is_refused(here: Path) -> None:
    with pytest.raises(SamplingError, match="no object matches"):
        look(here, {"url": f"{here}/a/*.txt"})
