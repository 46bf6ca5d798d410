"""The user's transform: found, called by name, repeatable, and blamed with file and line."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.errors import ConfigError, FormatError
from growcache.sampling.fill import SampleTransform, load_transform
from growcache.schema import Origin
from growcache.usercode import syntax_of

ORIGIN = Origin("a/b.npy", None, 0, 1)
SAMPLE = {"x": np.arange(4, dtype=np.float32)}
WHERE = (0, "a/b.npy", 0, 0)

MODULE = """
import random
import numpy as np

def noise(sample, rng):
    return {"x": sample["x"] + rng.normal(size=4).astype("f4"), "y": np.int64(random.randrange(99))}

def careless(sample):
    sample["x"][:] = 0
    return sample

def fails(sample, origin):
    raise KeyError("no such channel")

def nonsense(sample):
    return 7

def wants(sample, other):
    return sample

def shifted(sample, by, times=1):
    return {"x": sample["x"] + by * times}

def passes_over(sample, origin):
    return sample if origin.start else None

def same(sample):
    return sample

def deep(sample):
    return np.reshape(sample["x"], (7, 7))

def empty(sample):
    return {}

def numbered(sample):
    return {3: sample["x"]}

def uneven(sample):
    return {"x": [[1], [2, 3]]}

def leaves(sample):
    raise SystemExit(3)

def texts(sample):
    return {"text": "é", "data": b"ab", "more": bytearray(b"12"), "x": [1, 2]}

class Reused:
    def __init__(self):
        self.out = np.zeros(4, "f4")
    def __call__(self, sample, origin):
        self.out[:] = origin.start
        return {"x": self.out, "y": self.out[:2]}

class Broken:
    def __init__(self, by):
        raise RuntimeError("no" + chr(10) + "way")
    def __call__(self, sample):
        return sample

class Scale:
    def __init__(self, by):
        self.by = by
    def __call__(self, sample):
        return {"x": sample["x"] * self.by}

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "user_transforms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "user_transforms"
    sys.modules.pop("user_transforms", None)


def load(name: str, seed: int = 0, **options: object) -> SampleTransform:
    found = load_transform(name, options, seed)
    assert found is not None
    return found


def test_no_name_is_no_transform() -> None:
    assert load_transform(None, {}, 0) is None


@pytest.mark.mutant(
    5, "growcache.sampling.fill:SampleTransform.__call__", "random.seed(bits)", ""
)
def test_randomness_depends_on_the_place_alone(module: str) -> None:
    noise = load(f"{module}:noise")
    first, again = noise(SAMPLE, ORIGIN, WHERE), noise(SAMPLE, ORIGIN, WHERE)
    random.seed(1)
    other = noise(SAMPLE, ORIGIN, (0, "a/b.npy", 0, 1))
    seeded = load(f"{module}:noise", 1)(SAMPLE, ORIGIN, WHERE)
    assert first
    assert again
    assert other
    assert seeded
    assert np.array_equal(first["x"], again["x"])
    assert first["y"] == again["y"]
    assert not np.array_equal(first["x"], other["x"])
    assert not np.array_equal(first["x"], seeded["x"])


def test_the_transform_may_write_on_what_it_is_given(module: str) -> None:
    load(f"{module}:careless")(SAMPLE, ORIGIN, WHERE)
    assert SAMPLE["x"].tolist() == [0, 1, 2, 3]


def test_a_class_is_made_once_with_the_options(module: str) -> None:
    made = load(f"{module}:Scale", by=3)(SAMPLE, ORIGIN, WHERE)
    assert made is not None
    assert made["x"].tolist() == [0, 3, 6, 9]


def test_a_function_takes_options_by_name(module: str) -> None:
    made = load(f"{module}:shifted", by=2, times=5)(SAMPLE, ORIGIN, WHERE)
    assert made is not None
    assert made["x"].tolist() == [10, 11, 12, 13]


def test_an_exception_names_object_file_and_line(module: str) -> None:
    line = MODULE.splitlines().index('    raise KeyError("no such channel")') + 1
    words = f"raised KeyError: 'no such channel' at user_transforms.py:{line} on a/b.npy"
    with pytest.raises(FormatError, match=re.escape(words)):
        load(f"{module}:fails")(SAMPLE, ORIGIN, WHERE)


def test_the_line_is_the_users_own(module: str) -> None:
    line = MODULE.splitlines().index('    return np.reshape(sample["x"], (7, 7))') + 1
    with pytest.raises(FormatError, match=rf"ValueError: .* at user_transforms.py:{line} on"):
        load(f"{module}:deep")(SAMPLE, ORIGIN, WHERE)


def test_a_line_in_a_package_is_shown_with_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_package" / "deep").mkdir(parents=True)
    for folder in ("user_package", "user_package/deep"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "user_package/helpers.py").write_text("def check(x):\n    assert x is None\n")
    (tmp_path / "user_package/deep/steps.py").write_text(
        "from user_package.helpers import check\n\ndef step(sample):\n    check(sample)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FormatError, match=r"AssertionError at user_package/helpers\.py:2 on"):
        load("user_package.deep.steps:step")(SAMPLE, ORIGIN, WHERE)


def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_slip.py").write_text("def f(sample):\n    return (\n")
    (tmp_path / "user_boom.py").write_text("x = 1\nraise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"SyntaxError: .*user_slip\.py, line 2"):
        load("user_slip:f")
    with pytest.raises(ConfigError, match=r"RuntimeError: at import \(at user_boom\.py:2\)"):
        load("user_boom:f")
    with pytest.raises(
        ConfigError, match=f"No module named 'user_none'; looked for in {Path.cwd()}"
    ):
        load("user_none:f")


def test_a_long_key_leaves_room_for_the_reason(module: str) -> None:
    long = Origin("k" * 1000 + "/end.npy", None, 0, 1)
    with pytest.raises(FormatError, match=r"(?m)no such channel.*…k+/end\.npy$") as caught:
        load(f"{module}:fails")(SAMPLE, long, WHERE)
    assert len(str(caught.value)) < 300


def test_leaving_the_program_is_a_failure_like_others(module: str) -> None:
    with pytest.raises(FormatError, match=r"SystemExit: 3 at user_transforms\.py"):
        load(f"{module}:leaves")(SAMPLE, ORIGIN, WHERE)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", "on a/b.npy: expected a dict of arrays, found int"),
        ("empty", "expected a dict of arrays, found an empty one"),
        ("numbered", "expected a str as name of an array, found 3"),
        ("uneven", "'x' is not an array: ValueError"),
    ],
)
def test_nonsense_is_refused(module: str, name: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        load(f"{module}:{name}")(SAMPLE, ORIGIN, WHERE)


def test_none_passes_over_the_sample(module: str) -> None:
    some = load(f"{module}:passes_over")
    assert some(SAMPLE, ORIGIN, WHERE) is None
    assert some(SAMPLE, Origin("a/b.npy", None, 1, 2), WHERE) is not None


def test_an_array_that_is_filled_anew_each_time_is_copied(module: str) -> None:
    reused = load(f"{module}:Reused")
    made = [reused(SAMPLE, Origin("k", None, start, 9), WHERE) for start in range(3)]
    assert [int(sample[name][0]) for sample in made if sample for name in "xy"] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


def test_bytes_and_texts_are_kept_and_lists_are_arrays(module: str) -> None:
    made = load(f"{module}:texts")(SAMPLE, ORIGIN, WHERE)
    assert made is not None
    assert (made["text"], made["data"], made["more"]) == ("é", b"ab", b"12")
    assert np.asarray(made["x"]).tolist() == [1, 2]


def test_what_is_given_may_be_returned(module: str) -> None:
    made = load(f"{module}:same")(SAMPLE, ORIGIN, WHERE)
    assert made is not None
    assert made["x"].tolist() == [0, 1, 2, 3]
    assert not np.shares_memory(made["x"], SAMPLE["x"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("user_transforms", {}, "package.module:function"),
        ("no_such_module:f", {}, "cannot load"),
        ("user_transforms:absent", {}, "cannot load"),
        ("user_transforms:number", {}, "not callable"),
        ("user_transforms:wants", {}, "of which other cannot be given"),
        ("user_transforms:nois", {}, "did you mean noise?"),
        ("user_transforms:noise", {"a": 1}, "takes no option 'a'; it takes none"),
        ("user_transforms:shifted", {"time": 1}, "did you mean times?"),
        ("user_transforms:shifted", {}, "of which by cannot be given"),
        ("user_transforms:shifted", {"by": 1, "sample": 2}, "takes no option 'sample'"),
        ("user_transforms:Broken", {"by": 1}, "do not fit .*RuntimeError: no way"),
        ("random:random", {}, "must take sample"),
        ("user_transforms:Scale", {"by": 1, "up": 2}, "do not fit"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    module: str, name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_transform(name, options, 0)


@pytest.mark.mutant(
    4, "growcache.usercode:source_digest", "_digest(syntax_of(source))", "_digest(source)"
)
def test_the_digest_follows_the_syntax_but_no_comment(module: str, tmp_path: Path) -> None:
    before = load(f"{module}:noise").digest
    path = tmp_path / "user_transforms.py"
    sys.modules.pop(module)
    path.write_text(MODULE + "\n# changed\n")
    commented = load(f"{module}:noise").digest
    assert (commented.syntax == before.syntax, commented.text == before.text) == (True, False)
    sys.modules.pop(module)
    path.write_text(MODULE + "\nchanged = True\n")
    assert load(f"{module}:noise").digest.syntax != before.syntax


_LINES = [
    "x = 1",
    "x = 2",
    "x = '1'",
    "x = u'1'",
    "x = b'1'",
    "x = None",
    "return_ = x",
    "pass",
]
_BODIES = st.lists(st.sampled_from(_LINES), min_size=1, max_size=4)


@given(_BODIES, _BODIES)
def test_syntax_differs_exactly_where_code_does(a: list[str], b: list[str]) -> None:
    def module(lines: list[str], about: str) -> bytes:
        body = "".join(f"    {line}{about and '  # ' + about}\n" for line in lines)
        doc = f"    '''{about}'''\n" if about else ""
        return f"def f():\n{doc}{body}".encode()

    def meaning(lines: list[str]) -> list[str]:
        return [line.replace("u'1'", "'1'") for line in lines]

    same = syntax_of(module(a, "")) == syntax_of(module(b, "another comment"))
    assert same == (meaning(a) == meaning(b))


@pytest.mark.mutant(
    4,
    "growcache.usercode:syntax_of",
    "any(word in text for word in _READING_DOCSTRINGS)",
    "False",
)
@pytest.mark.parametrize(
    "use", ["f.__doc__", "getattr(f, '__doc__')", "inspect.getdoc(f)", "1"]
)
def test_a_docstring_counts_where_the_code_may_read_it(use: str) -> None:
    def module(about: str, comment: str = "") -> bytes:
        return f"def f(): {about!r}\nx = {use}  # {comment}\n".encode()

    assert (syntax_of(module("a")) == syntax_of(module("b"))) == (use == "1")
    assert syntax_of(module("a")) == syntax_of(module("a", "not read: __doc__"))


def test_what_is_no_python_is_told_apart_by_its_bytes() -> None:
    assert syntax_of(b"\x7fELF\0") == b"\x7fELF\0"
