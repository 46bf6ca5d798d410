"""`make test-cloud` leaves nothing in a user's bucket, or says what it left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from tests.cloud import __main__ as cloud
from tests.cloud.objects import Kept, erase_all, open_objects
from tests.cloud.place import key_of

FOLDER = "s3://bucket/scratch/growcache-test-0123456789ab/"
PREFIX = "scratch/growcache-test-0123456789ab/"


@dataclass
class Versioned:
    """A bucket that keeps versions: what is deleted by its name is kept as an older version."""

    held: set[Kept] = field(default_factory=set)
    locked: str = "never"

    def put(self, key: str, data: bytes) -> None:
        self.held.add(Kept(key, f"v{len(self.held)}"))

    def delete(self, key: str) -> None:
        current = {one for one in self.held if one.key == key and one.is_current}
        self.held = (self.held - current) | {Kept(k.key, k.version, False) for k in current}

    def kept(self, prefix: str) -> Iterable[Kept]:
        return [one for one in self.held if one.key.startswith(prefix)]

    def erase(self, one: Kept) -> None:
        if self.locked in one.key:
            raise PermissionError("locked until 2027")
        if one.is_current:
            self.delete(one.key)
        else:
            self.held.discard(one)


def filled(locked: str = "never") -> Versioned:
    bucket = Versioned(locked=locked)
    for key in ("a", "a", "b", "locked"):
        bucket.put(PREFIX + key, b"")
    bucket.put("of the user", b"")
    return bucket


def test_all_versions_go_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    bucket = filled()
    assert erase_all(bucket, PREFIX) == ([], None)
    assert [one.key for one in bucket.held] == ["of the user"]
    assert cloud.remove(bucket, FOLDER)
    assert "nothing is left" in capsys.readouterr().out


def test_what_cannot_be_removed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not cloud.remove(filled(locked="locked"), FOLDER)
    said = capsys.readouterr().err
    assert f"left: {PREFIX}locked v3" in said
    assert "PermissionError: locked until 2027" in said
    assert f"-m tests.cloud --remove {FOLDER}" in said


@pytest.mark.parametrize("ending", ["passes", "fails", "interrupted"])
def test_it_removes_however_the_tests_end(
    monkeypatch: pytest.MonkeyPatch, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = Versioned()

    def suite(folder: str, _arguments: Sequence[str]) -> int:
        bucket.put(key_of(folder) + "x", b"")
        if ending == "interrupted":
            raise KeyboardInterrupt
        return int(ending == "fails")

    monkeypatch.setattr(cloud, "open_objects", lambda *_: bucket)
    monkeypatch.setattr(cloud, "run_suite", suite)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    code = cloud.main(["--url", "s3://bucket/scratch"])
    assert code == {"passes": 0, "fails": 1, "interrupted": 130}[ending]
    assert not bucket.held


def test_only_a_folder_of_its_own_is_erased(capsys: pytest.CaptureFixture[str]) -> None:
    assert cloud.main(["--remove", "s3://bucket/scratch/"]) == 2
    assert "growcache-test-<12 digits>/" in capsys.readouterr().err


def test_a_url_of_no_cloud_is_refused() -> None:
    for url in ("", "http://host/x", "s3://"):
        with pytest.raises(ValueError, match="expected s3://BUCKET"):
            open_objects(url, {})
