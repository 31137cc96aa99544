"""The manifest and the files it lists: round trips, canonical bytes, and every tampering refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from targets import bundle as module
from targets.arena import Arena, Placed
from targets.budget import MemoryPlan, Phase, Term
from targets.bundle import (
    MANIFEST,
    FileEntry,
    LeftAlone,
    Manifest,
    OutputError,
    Quantization,
    Residency,
    SampleTensor,
    Segment,
    Source,
    Verification,
    dumps,
    file_sha256,
    loads,
    read_manifest,
    safe_path,
    sealed,
    verify_files,
)
from targets.errors import BundleError
from targets.tensor import Contract, DimRange, DType, TensorSpec

FILES = {
    "segments/00.onnx": b"graph",
    "weights/00.bin": bytes(range(256)) * 20,
    "sample/x.bin": b"\0" * 16,
    "assets/labels.txt": b"a\nb\n",
    "report.json": b"{}",
}


def manifest_for(files: dict[str, bytes]) -> Manifest:
    fixed = (Term("runtime", "anonymous", 10), Term("weights", "file", 20))
    run = (*fixed, Term("activations", "anonymous", 8), Term("io_slots", "shared", 8))
    return sealed(
        Manifest(
            schema=1,
            name="reader",
            target="raspberry-pi-5-4gb",
            runtime="onnxruntime",
            source=Source("reader.onnx", "0" * 64, "1" * 64),
            contract=Contract(
                (TensorSpec("x", DType.FLOAT32, (1, "width"), 64),),
                (TensorSpec("y", DType.FLOAT32, ("t", 2), 64),),
                {"width": DimRange(1, 4, 16)},
            ),
            segments=(Segment("segments/00.onnx", ("x",), ("y",), {"key": "value"}, Residency.MAPPED),),
            plan=MemoryPlan(
                1000, 1, (Phase("load", fixed), Phase("run", run)), Arena(8, 8, 1, (Placed("a", 0, 1, 8, 0),))
            ),
            quantization=Quantization("int8-weights", {"MatMul": 2}, (LeftAlone("Conv", 1, 9, "small"),), 40, 20),
            verification=Verification("random", 2, (OutputError("y", 0.5, 0.25, 0.999, 1.0),)),
            sample=(SampleTensor("x", (1, 4), "sample/x.bin"),),
            assets=("assets/labels.txt",),
            options={"scheme": "int8-weights"},
            tools={"tightfit": "0.1.0"},
            files=tuple(FileEntry(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in files.items()),
        )
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle that is in order."""
    root = tmp_path / "reader.tfb"
    for path, data in FILES.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    (root / MANIFEST).write_bytes(dumps(manifest_for(FILES)))
    return root


def verify(folder: Path) -> None:
    verify_files(folder, read_manifest(folder))


def refusal(action: Callable[[], object]) -> str:
    """The one line with which `action` is refused."""
    with pytest.raises(BundleError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Rewrite the manifest's JSON, and seal it if it is one still."""
    fields = json.loads((folder / MANIFEST).read_bytes())
    change(fields)
    data = json.dumps(fields).encode()
    with contextlib.suppress(msgspec.ValidationError):
        data = dumps(sealed(msgspec.json.decode(data, type=Manifest)))
    (folder / MANIFEST).write_bytes(data)
    return folder


def test_a_bundle_in_order_is_accepted(folder: Path) -> None:
    heard: list[int] = []
    verify_files(folder, read_manifest(folder), heard.append)
    assert sum(heard) == sum(map(len, FILES.values()))


def test_round_trip_and_canonical_bytes(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest == manifest_for(FILES)
    assert dumps(manifest) == (folder / MANIFEST).read_bytes()
    reordered = json.dumps(dict(reversed(json.loads(dumps(manifest)).items())), indent=7).encode()
    assert dumps(loads(reordered)) == dumps(manifest)
    assert loads(reordered).digest == manifest.digest
    assert int(manifest.version) == int(manifest.digest[:12], 16)


def test_the_digest_covers_every_file() -> None:
    other = manifest_for({**FILES, "weights/00.bin": b"other"})
    assert other.digest != manifest_for(FILES).digest


@given(name=st.text(max_size=120))
def test_model_names_are_safe_in_urls_topics_and_files(name: str) -> None:
    good = module.NAME.fullmatch(name)
    try:
        msgspec.structs.replace(manifest_for(FILES), name=name)
    except ValueError:
        assert not good
    else:
        assert good
        assert not set(name) & set("/+#?\0 \n")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_manifest_or_a_refusal(data: bytes) -> None:
    with pytest.raises(BundleError):
        loads(data)


@given(position=st.integers(0, len(dumps(manifest_for(FILES))) - 1), byte=st.integers(0, 255))
def test_a_manifest_with_one_changed_byte_is_refused_or_says_the_same(position: int, byte: int) -> None:
    data = bytearray(dumps(manifest_for(FILES)))
    data[position] = byte
    try:
        changed = loads(bytes(data))
    except BundleError:
        return
    assert changed == manifest_for(FILES)


def test_a_manifest_without_a_seal_is_refused() -> None:
    data = dumps(msgspec.structs.replace(manifest_for(FILES), seal=""))
    assert "manifest.json has no seal (copy or compile the bundle again)" in refusal(lambda: loads(data))


@pytest.mark.parametrize("number", ["1" + "0" * 30, "1" + "0" * 400], ids=["large", "huge"])
@pytest.mark.parametrize("field", ["max", "budget_bytes", "nbytes"])
def test_numbers_that_no_machine_has_are_refused(field: str, number: str) -> None:
    data = re.sub(f'"{field}": [0-9]+'.encode(), f'"{field}": {number}'.encode(), dumps(manifest_for(FILES)))
    assert "manifest.json" in refusal(lambda: loads(data))


def test_nesting_without_end_is_refused() -> None:
    data = b'{"schema": 1, "x": ' + b"[" * 100_000
    assert "is not a valid manifest" in refusal(lambda: loads(data))


@pytest.mark.parametrize("path", FILES)
def test_one_changed_byte_is_refused(folder: Path, path: str) -> None:
    data = bytearray((folder / path).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / path).write_bytes(data)
    assert f"{path} was changed: its SHA-256 differs" in refusal(lambda: verify(folder))


@pytest.mark.parametrize("path", FILES)
def test_a_truncated_file_is_refused(folder: Path, path: str) -> None:
    os.truncate(folder / path, len(FILES[path]) - 1)
    assert f"bytes instead of {len(FILES[path])}" in refusal(lambda: verify(folder))


def test_a_grown_file_is_refused(folder: Path) -> None:
    with (folder / "weights/00.bin").open("ab") as file:
        file.write(b"!")
    assert "bytes instead of" in refusal(lambda: verify(folder))


def test_a_missing_file_is_refused(folder: Path) -> None:
    (folder / "weights/00.bin").unlink()
    assert "weights/00.bin cannot be read: No such file" in refusal(lambda: verify(folder))


def test_a_file_behind_a_symlink_is_refused(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    (folder / "weights/00.bin").rename(outside)
    (folder / "weights/00.bin").symlink_to(outside)
    assert "is a link or a special file" in refusal(lambda: verify(folder))


def test_a_folder_behind_a_symlink_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "weights").rename(tmp_path / "outside")
    (folder / "weights").symlink_to(tmp_path / "outside")
    assert "bundle folder weights is a link" in refusal(lambda: verify(folder))


def test_a_hard_link_is_refused(folder: Path, tmp_path: Path) -> None:
    os.link(folder / "weights/00.bin", tmp_path / "second.bin")
    assert "second hard link" in refusal(lambda: verify(folder))


def test_a_special_file_is_refused(folder: Path) -> None:
    (folder / "weights/00.bin").unlink()
    os.mkfifo(folder / "weights/00.bin")
    assert "is a link or a special file" in refusal(lambda: verify(folder))


def test_a_folder_in_place_of_a_file_is_refused(folder: Path) -> None:
    (folder / "weights/00.bin").unlink()
    (folder / "weights/00.bin").mkdir()
    assert "is a link or a special file" in refusal(lambda: verify(folder))


@pytest.mark.parametrize(
    "path",
    [
        "../outside.bin",
        "weights/../../outside.bin",
        "/etc/hostname",
        "weights\\00.bin",
        "weights/00\0.bin",
        "",
        "..",
    ],
)
def test_paths_out_of_the_bundle_are_refused(folder: Path, path: str) -> None:
    assert "does not stay inside the bundle" in refusal(lambda: safe_path(folder, path))
    with_manifest(folder, lambda fields: fields["files"][1].update(path=path))
    assert "does not stay inside the bundle" in refusal(lambda: verify(folder))


@pytest.mark.parametrize("path", [".", "weights", "x" * 5000, "weights/" + "y" * 300 + "/z"])
def test_paths_that_are_no_files_are_refused(folder: Path, path: str) -> None:
    with_manifest(folder, lambda fields: fields["files"].append({"path": path, "nbytes": 0, "sha256": ""}))
    refusal(lambda: verify(folder))


@given(st.text(max_size=40))
def test_a_safe_path_stays_inside(path: str) -> None:
    root = Path("/bundle")
    try:
        found = safe_path(root, path)
    except BundleError:
        return
    assert Path(os.path.normpath(found)).is_relative_to(root)


@pytest.mark.parametrize("table", ["segments", "sample"])
def test_a_name_that_is_not_listed_is_refused(folder: Path, table: str) -> None:
    with_manifest(folder, lambda fields: fields[table][0].update(file="segments/99.onnx"))
    assert "uses segments/99.onnx, which is not among its files" in refusal(lambda: verify(folder))


def test_an_asset_that_is_not_listed_is_refused(folder: Path) -> None:
    with_manifest(folder, lambda fields: fields["assets"].append("assets/none.txt"))
    assert "uses assets/none.txt" in refusal(lambda: verify(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(colour="red"), "unknown field `colour`"),
        (lambda f: f["plan"]["phases"][0]["terms"][0].update(x=1), "unknown field `x`"),
        (lambda f: f["segments"][0].pop("file"), "missing required field `file`"),
        (lambda f: f.update(schema=2), "has schema 2, this version reads 1"),
        (lambda f: f.update(schema=2, colour="red"), "has schema 2, this version reads 1"),
        (lambda f: f.update(schema="1"), "is not a valid manifest"),
        (lambda f: f.pop("schema"), "missing required field `schema`"),
        (lambda f: f.update(segments=[]), "at least one segment"),
        (lambda f: f["segments"][0].update(residency="cloud"), "Invalid enum value 'cloud'"),
        (lambda f: f["segments"][0].update(settings={"threads": 2}), "Expected `str`, got `int`"),
        (lambda f: f.update(name="../x"), "model name '../x'"),
        (lambda f: f["contract"]["dims"]["width"].update(min=9), "min <= opt <= max"),
        (lambda f: f["plan"]["arena"]["buffers"][0].update(upper=0), "lower < upper"),
        (lambda f: f["files"][0].update(nbytes="many"), "Expected `int`"),
    ],
)
def test_a_wrong_manifest_is_refused(folder: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    with_manifest(folder, change)
    assert message in refusal(lambda: read_manifest(folder))


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_truncated_manifest_is_refused(folder: Path, length: int) -> None:
    os.truncate(folder / MANIFEST, length)
    assert "is not a valid manifest" in refusal(lambda: read_manifest(folder))


def test_places_without_a_bundle_are_named(folder: Path, tmp_path: Path) -> None:
    assert "is not there" in refusal(lambda: read_manifest(tmp_path / "none"))
    assert "is a file" in refusal(lambda: read_manifest(folder / "report.json"))
    (folder / MANIFEST).unlink()
    assert "has no manifest.json" in refusal(lambda: read_manifest(folder))


def test_a_manifest_behind_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / MANIFEST).rename(tmp_path / "m.json")
    (folder / MANIFEST).symlink_to(tmp_path / "m.json")
    assert "is a link" in refusal(lambda: read_manifest(folder))


def test_an_enormous_manifest_is_not_read(folder: Path) -> None:
    os.truncate(folder / MANIFEST, module.MAX_MANIFEST_BYTES + 1)
    assert "at most 64.0 MiB are read" in refusal(lambda: read_manifest(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("path", [MANIFEST, "weights/00.bin"])
def test_an_unreadable_file_is_a_refusal(folder: Path, path: str) -> None:
    (folder / path).chmod(0)
    assert "cannot be read: Permission denied" in refusal(lambda: verify(folder))


@pytest.mark.parametrize("method", ["read_bytes", "open"])
def test_a_failing_disk_is_a_refusal(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(folder)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, method, fail)
    action = {"read_bytes": lambda: read_manifest(folder), "open": lambda: verify_files(folder, manifest)}[method]
    assert "cannot be read: Input/output error" in refusal(action)


def test_a_copy_is_as_good_as_the_original(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.tfb"
    shutil.copytree(folder, copy)
    verify(copy)
    assert read_manifest(copy).version == read_manifest(folder).version


def test_file_sha256_streams(tmp_path: Path) -> None:
    data = os.urandom((3 << 20) + 17)
    (tmp_path / "x").write_bytes(data)
    steps: list[int] = []
    assert file_sha256(tmp_path / "x", steps.append) == hashlib.sha256(data).hexdigest()
    assert sum(steps) == len(data)
    assert max(steps) <= 1 << 20
