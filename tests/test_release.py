"""A release is refused where the tree does not say the same everywhere, or an artefact is not what git holds."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import growcache
from tools import release

ROOT = Path(__file__).parent.parent
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SAYS_ALL = {
    "changelog": "## [Unreleased]\n\n## [1.2.0] - 2026-01-02\n",
    "citation": "a: b\nversion: 1.2.0\n",
    "changes": "",
    "tags_elsewhere": {"v1.1.0"},
}


def test_the_version_is_the_same_everywhere() -> None:
    problems = release.source_problems(
        growcache.__version__,
        changelog=CHANGELOG,
        citation=(ROOT / "CITATION.cff").read_text(encoding="utf-8"),
        changes="",
        tags_elsewhere=set(),
    )
    assert [one for one in problems if "[Unreleased]" not in one] == []


def test_the_changelog_is_short_enough_to_be_read() -> None:
    assert len(CHANGELOG.splitlines()) <= 200


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"changes": " M growcache/config.py\n"}, "not committed"),
        ({"changelog": "## [1.1.0] - 2026-01-02\n"}, r"no section `## \[1\.2\.0\]"),
        ({"changelog": "## [Unreleased]\n- x\n\n## [1.2.0] - 2026-01-02\n"}, "Unreleased"),
        ({"citation": "a: b\nversion: 1.1.0\n"}, "CITATION"),
        ({"tags_elsewhere": {"v1.2.0"}}, "raise the version"),
    ],
)
def test_what_keeps_a_tree_from_being_released(
    change: dict[str, object], problem: str | None
) -> None:
    found = release.source_problems("1.2.0", **{**SAYS_ALL, **change})  # type: ignore[arg-type]
    assert len(found) == (problem is not None)
    assert problem is None or re.search(problem, found[0])


def test_an_artefact_holds_what_git_tracks_and_nothing_else() -> None:
    tracked = ["growcache/__init__.py", "growcache/py.typed", *release.LICENCES, "tests/a.py"]
    tracked += release.SDIST_NEEDS
    info = "growcache-1.0.dist-info"
    wheel = [name for name in tracked if name.startswith("growcache/")]
    wheel += [f"{info}/METADATA", *(f"{info}/licenses/{name}" for name in release.LICENCES)]
    assert release.wheel_problems("1.0", wheel, tracked) == []
    assert release.wheel_problems("1.0", [*wheel, "tests/a.py"], tracked) == [
        "the wheel should not have tests/a.py"
    ]
    sdist = [f"growcache-1.0/{name}" for name in tracked]
    assert release.sdist_problems("1.0", sdist, tracked) == []
    assert (
        len(release.sdist_problems("1.0", [*sdist[1:], "growcache-1.0/.venv/x"], tracked)) == 2
    )


def test_the_wheel_has_the_notebooks_of_the_tutorials_and_no_other_page() -> None:
    tracked = [*release.LICENCES, "docs/tutorials/eeg.ipynb", "docs/tutorials/index.md"]
    info = "growcache-1.0.dist-info"
    wheel = [release.LICENCES[1], *(f"{info}/licenses/{name}" for name in release.LICENCES)]
    notebook = "growcache/tutorials/eeg.ipynb"
    assert release.wheel_problems("1.0", [*wheel, notebook], tracked) == []
    assert release.wheel_problems("1.0", wheel, tracked) == [f"the wheel lacks {notebook}"]
    other = "growcache/tutorials/other.ipynb"
    assert release.wheel_problems("1.0", [*wheel, notebook, other], tracked) == [
        f"the wheel should not have {other}"
    ]


def test_two_builds_are_compared_by_name_and_by_bytes(tmp_path: Path) -> None:
    builds = []
    for folder, contents in (("one", b"1"), ("two", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same").write_bytes(b"0")
        (tmp_path / folder / "other").write_bytes(contents)
        builds.append(sorted((tmp_path / folder).iterdir()))
    assert release.differing(builds[0], builds[0]) == []
    assert release.differing(*builds) == ["other"]
    assert release.differing(builds[0], builds[1][1:]) == ["other"]


def direct_dependencies() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {canonicalize_name(Requirement(text).name) for group in groups for text in group}


def test_the_licence_of_each_dependency_is_listed() -> None:
    page = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| \d\S* \| ([^|]+) \|", page, re.MULTILINE)
    licences = {canonicalize_name(name): licence for name, licence in rows}
    assert direct_dependencies() <= licences.keys()
    strong = {name for name, licence in licences.items() if re.search(r"(?<!L)GPL", licence)}
    assert strong == {"asyncssh"}  # or EPL-2.0, at the user's choice


def deprecations(source: str) -> list[str]:
    """Return the messages by which a module deprecates something."""
    found = []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and call.args:
            name = ast.unparse(call.func).rpartition(".")[2]
            if name == "deprecated" or (name == "warn" and "Deprecat" in ast.unparse(call)):
                found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize(
    ("call", "valid"),
    [
        ("warnings.warn('x is deprecated, use y; it goes in 99.0', DeprecationWarning)", True),
        ("deprecated('x is deprecated, use y; it goes in 99.0')", True),
        ("warnings.warn('x is deprecated', DeprecationWarning)", False),
        ("warnings.warn('x goes in 99.0', PendingDeprecationWarning)", False),
        ("warnings.warn('x goes in 0.1', DeprecationWarning)", False),
    ],
)
def test_what_a_deprecation_must_say(call: str, valid: bool) -> None:
    assert keeps_the_policy(*deprecations(call)) == valid


def keeps_the_policy(call: str) -> bool:
    """The category users see, a version in which the name goes, and that version is still to come."""
    goes = re.search(r"goes in (\d+\.\d+)", call)
    category = "deprecated(" in call or " DeprecationWarning" in call
    return category and goes is not None and Version(goes[1]) > Version(growcache.__version__)


def test_deprecated_names_keep_the_policy() -> None:
    for path in (ROOT / "growcache").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for call in deprecations(source) if "eprecat" in source else ():
            assert keeps_the_policy(call), f"{path}: {call}; see docs/reference/versions.md"
