"""The contract that every object format keeps, whatever it decodes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from growcache.errors import (
    AccessError,
    ConfigError,
    GrowcacheError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.formats import FORMATS, open_format
from growcache.formats.base import ObjectFormat
from growcache.schema import Schema
from tests.formats.held import Held, Row, visited


@dataclass(frozen=True)
class Case:
    """A format, and an object that it reads."""

    form: str
    options: dict[str, Any]
    data: Callable[[], bytes]
    key: str = "folder/k"
    others: dict[str, bytes] = field(default_factory=dict)

    @property
    def parts(self) -> int:
        """Parts of which the first is a small one."""
        return 1 if self.open().listed else 1 << 40

    def open(self) -> ObjectFormat:
        return open_format(self.form, self.options)

    def held(self, **more: Any) -> Held:
        return self.of(self.data(), **more)

    def of(self, data: bytes, **more: Any) -> Held:
        return Held(data, self.key, {"neighbour": data, **self.others}, **more)


def parts_of(object_format: ObjectFormat, held: Held) -> int:
    return 1 if object_format.listed else asyncio.run(object_format.measure(held)).samples


def same(ones: list[Row], others: list[Row]) -> bool:
    return [row[1:] for row in ones] == [row[1:] for row in others] and all(
        one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)
        for (one, *_), (other, *_) in zip(ones, others, strict=True)
    )


class FormatTests:
    """Each format inherits these tests, and says what it reads and refuses."""

    form: ClassVar[str]
    cases: ClassVar[dict[str, Case]]
    wrong_options: ClassVar[list[tuple[dict[str, Any], str]]]
    any_bytes: ClassVar[tuple[str, ...]] = ()  # cases in which any object is sound
    empty_is_sound = False  # whether an object of no bytes has no samples
    imports: ClassVar[tuple[str, ...]] = ()  # other formats that it is made of
    library: ClassVar[str | None] = None  # which it cannot be opened without
    options: ClassVar[dict[str, Any]] = {}  # with which it can be opened

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases.values(), ids=self.cases.keys())
        if "words" in metafunc.fixturenames:
            metafunc.parametrize(("options", "words"), self.wrong_options)

    def test_a_visit_is_a_function_of_its_place(self, case: Case) -> None:
        object_format, held = case.open(), case.held()
        parts = parts_of(object_format, held)
        for round in (0, 3):
            first = visited(object_format, held, 0, parts, round=round, seed=1)
            assert first
            assert same(first, visited(object_format, held, 0, parts, round=round, seed=1))
            assert same(first, visited(case.open(), case.held(), 0, parts, round=round, seed=1))

    def test_samples_are_what_can_be_cached_and_origins_are_ranges(self, case: Case) -> None:
        object_format, held = case.open(), case.held()
        found = visited(object_format, held, 0, parts_of(object_format, held))
        schemas = {str(Schema.from_sample(sample)) for sample, _, _ in found}
        assert len(schemas) == 1
        for sample, start, stop in found:
            assert 0 <= start < stop
            for value in sample.values():
                if isinstance(value, np.ndarray):
                    assert value.dtype == value.dtype.newbyteorder("<")
                    assert value.flags.c_contiguous
                else:
                    assert isinstance(value, bytes | str | np.generic)

    def test_the_parts_of_an_object_are_its_samples(self, case: Case) -> None:
        object_format, held = case.open(), case.held()
        if not object_format.listed:
            ends = [
                start
                for part in range(3)
                for _, start, _ in visited(object_format, held, part, 1 << 40)
            ]
            assert ends == [0, 1, 2]
            return
        whole = visited(object_format, held)
        assert asyncio.run(object_format.measure(held)).samples == len(whole)
        for parts in (2, 3, 7) if object_format.ranged else ():
            pieces = [
                row
                for part in range(parts)
                for row in visited(object_format, held, part, parts)
            ]
            assert same(whole, pieces)

    def test_some_of_an_object_are_some_of_its_samples(self, case: Case) -> None:
        object_format, held = case.open(), case.held()
        if not object_format.listed:
            return
        whole = {row[1:]: row for row in visited(object_format, held)}
        some = visited(object_format, held, take=2)
        assert len(some) == min(2, len(whole))
        if object_format.ranged:
            assert same(some, [whole[row[1:]] for row in some])

    @pytest.mark.parametrize(
        "failure",
        [TransientStoreError("503"), ObjectMissingError("gone"), ObjectChangedError("new"),
         AccessError("no")],
    )  # fmt: skip
    def test_a_store_that_fails(self, case: Case, failure: StoreError) -> None:
        object_format = case.open()
        if not object_format.listed:
            return  # what it reads are other objects; see test_user_formats
        with pytest.raises(GrowcacheError) as caught:
            visited(object_format, case.held(failures=[failure]))
        assert isinstance(failure, TransientStoreError) == isinstance(
            caught.value, TransientStoreError
        )
        assert str(failure) in str(caught.value)
        assert same(
            visited(object_format, case.held()), visited(case.open(), case.held())
        )  # no harm done

    @settings(
        max_examples=25,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(data=st.data())
    def test_a_damaged_object_is_a_hole_or_a_sample_and_nothing_else(
        self, case: Case, data: st.DataObject
    ) -> None:
        sound = case.data()
        cut = data.draw(st.one_of(st.just(len(sound)), st.integers(0, len(sound))))
        damaged = bytearray(sound[:cut])
        for at in data.draw(st.lists(st.integers(0, max(0, cut - 1)), max_size=4)):
            if damaged:
                damaged[at] ^= data.draw(st.integers(1, 255))
        object_format = case.open()
        held = case.of(bytes(damaged))
        refused = ""
        try:
            found = visited(object_format, held, 0, 1 if object_format.listed else 1 << 40)
            for sample, _, _ in found:
                Schema.from_sample(sample)
        except GrowcacheError as error:
            refused = str(error)
        assert "\n" not in refused

    def test_an_object_that_is_cut_off_is_refused_or_read_as_far_as_it_goes(
        self, case: Case
    ) -> None:
        sound = case.data()
        whole = {row[1:] for row in visited(case.open(), case.held(), 0, case.parts)}
        for length in {len(sound) * n // 20 for n in range(20)}:
            try:
                found = visited(case.open(), case.of(sound[:length]), 0, case.parts)
            except GrowcacheError:
                continue
            assert len(found) <= len(whole)

    def test_what_is_no_object_of_the_format(self, case: Case) -> None:
        for text in (b"", b"<Error><Code>NoSuchKey</Code></Error>", bytes(200)):
            object_format, held = case.open(), case.of(text)
            name = next(name for name, one in self.cases.items() if one is case)
            if name in self.any_bytes or (self.empty_is_sound and not text):
                visited(object_format, held)
                continue
            with pytest.raises(GrowcacheError, match=r"folder/k|draw 0"):
                visited(object_format, held, 0, case.parts)

    def test_options_that_cannot_be_meant(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            open_format(self.form, options)

    def test_a_sampler_imports_only_this_format(self) -> None:
        if ":" in self.form:
            return
        code = f"""
import sys
from growcache.formats import check_format
check_format({self.form!r}, {self.options!r})
print(*sys.modules)
"""
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        loaded = set(done.stdout.split())
        names = {*FORMATS.values(), "join", "user"}
        assert {name for name in names if f"growcache.formats.{name}" in loaded} == {
            FORMATS[self.form],
            *self.imports,
        }
        libraries = {"h5py", "pyarrow", "PIL", "numcodecs", "google.protobuf", "zstandard"}
        assert not loaded & libraries

    def test_without_its_library_one_line_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if self.library is None:
            return
        monkeypatch.setitem(sys.modules, self.library, None)
        words = rf"(?m)^source.format: {self.form} needs {self.library}; pip install 'growcache\[{self.form}\]'$"
        with pytest.raises(ConfigError, match=words):
            open_format(self.form, self.options)
