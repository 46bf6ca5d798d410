"""Everything in the corpus, and small changes to it, end as each target promises.

The long search is `make fuzz`; what it found is in the corpus, and so is tried here.
"""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES = 48 << 20  # of memory that Python and NumPy count, for inputs of some kB
SLOW = ("catalog", "config", "listing", "notes", "shard")  # these write files


def inputs(target: str) -> list[Path]:
    return sorted((CORPUS / target).iterdir())


def cases() -> Iterator[tuple[str, str]]:
    for target in TARGETS:
        yield from ((target, path.name) for path in inputs(target))


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_of_the_corpus(target: str) -> None:
    paths = list(inputs(target))
    with warnings.catch_warnings(action="ignore"):
        TARGETS[target](paths[0].read_bytes())  # imports its library, which takes memory, too
    for path in paths:
        data = path.read_bytes()
        tracemalloc.start()
        try:
            with warnings.catch_warnings(action="ignore"):  # Pillow's, of broken images
                TARGETS[target](data)
            _, peak = tracemalloc.get_traced_memory()
        except Exception as error:
            error.add_note(f"the input: {path}")
            raise
        finally:
            tracemalloc.stop()
        assert peak < MOST_BYTES, f"{path} took {peak:,} bytes"


@st.composite
def changed(draw: st.DrawFn, target: str) -> bytes:
    """An input of the corpus with a few bytes replaced, put in, or taken out."""
    data = bytearray(draw(st.sampled_from(inputs(target))).read_bytes())
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        stop = at + draw(st.integers(0, 4))
        data[at:stop] = draw(st.binary(max_size=6))
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_small_changes_to_the_corpus(target: str) -> None:
    count = 10 if target in SLOW else 25

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(changed(target))
    def check(data: bytes) -> None:
        with warnings.catch_warnings(action="ignore"):
            TARGETS[target](data)

    check()


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 1_000_000
