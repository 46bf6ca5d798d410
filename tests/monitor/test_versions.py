"""Reports name the versions of the libraries, whichever build of them is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from growcache.monitor import versions


@pytest.mark.parametrize("build", ["tensorflow", "tensorflow-cpu", "tensorflow-rocm"])
def test_each_build_of_tensorflow_is_named(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    def version(name: str) -> str:
        if name in ("growcache", build):
            return f"1.0 of {name}"
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", version)
    found = versions.library_versions()
    assert list(found) == ["Python", "growcache", "tensorflow"]
    assert found["tensorflow"] == f"1.0 of {build}"
