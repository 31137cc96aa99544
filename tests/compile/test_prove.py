"""Proof by force: small bundles under real limits, and what the figures mean."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from compile import prove as module
from compile.errors import OptionError
from compile.limits import DataLimit, Limit, limited
from compile.options import Options
from compile.pipeline import compile_model
from compile.processes import Mapped
from compile.progress import Progress
from compile.prove import PhaseProof, Run, Verdict, prove
from compile.prove_report import print_proof, proof_json, ratio
from compile.sampler import Peak
from compile.serving import Requests
from compile.shapes import parse_shape
from targets.board import load_board
from targets.budget import FINALISE, Term
from targets.bundle import Manifest, Residency, read_manifest
from targets.errors import BudgetError, BundleError
from targets.tensor import DType, human
from tests.support.bundles import add, every_type, rewrite
from tests.support.models import init, mlp, model, node, normal, save, value

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 MiB of weights, up to 256 rows of 4 KiB in and out, 2 slots."""
    folder = tmp_path_factory.mktemp("prove")
    source = mlp(folder, rows="n", k=1024, n=1536)
    options = Options(shapes=(parse_shape("x=1..256,1024"),), slots=2)
    compile_model(source, load_board("raspberry-pi-5-4gb"), folder / "mlp.tfb", options)
    return folder / "mlp.tfb"


@pytest.fixture(scope="module")
def fixed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The runtime alone, measured once for all tests."""
    return module.measure_fixed(read_manifest(bundle), tmp_path_factory.mktemp("fixed"), 60)


@pytest.fixture
def measured_before(fixed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_fixed", lambda *_: fixed)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "compile", "prove", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_small_bundle_fits_and_stays_below_its_plan(bundle: Path) -> None:
    done = command(str(bundle), "--rounds", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)
    assert proof["verdict"] == "fits"
    assert proof["limit_bytes"] == read_manifest(bundle).plan.budget_bytes
    assert proof["oom_kills"] == 0
    load, run = proof["phases"]
    assert (load["name"], run["name"]) == ("load", "run")
    for phase in (load, run):
        assert phase["measured_total"] <= phase["predicted_total"]
    # Its weights are there, and the slots were filled: what is measured is this model, not an idle service.
    assert run["measured"]["anonymous"] > 11 * MIB
    assert run["own_peaks"]["shared"] == pytest.approx(4 * MIB, rel=0.1)
    assert 0 < proof["fixed"]["anonymous"] < proof["fixed"]["predicted"]
    speed = proof["speed"]
    assert speed["passes"] == 4
    assert speed["pass_s"] > 0
    assert speed["request_s"] > 0
    assert speed["opened_bytes"] == 0


def test_a_streamed_bundle_says_what_a_pass_opens(tmp_path: Path) -> None:
    options = Options(shapes=(parse_shape("x=1..16,1024"),), residency=Residency.STREAMED, slots=2)
    out = tmp_path / "mlp.tfb"
    compile_model(mlp(tmp_path, rows="n", k=1024, n=1536), load_board("raspberry-pi-5-4gb"), out, options)
    proof = prove(out, rounds=2)
    assert proof.verdict is Verdict.FITS
    assert proof.speed is not None
    assert proof.speed.requests == 4
    assert 2 <= proof.speed.passes <= 4
    # A single segment has its place for itself, so that its 12 MiB are read once.
    assert proof.speed.opened_bytes == 12 * MIB // proof.speed.passes
    console = Console(record=True, width=120)
    print_proof(proof, console)
    lines = [line for line in console.export_text().splitlines() if "a pass" in line]
    assert any("opened files" in line and human(proof.speed.opened_bytes) in line for line in lines)
    assert any("time in the engine" in line and f"{proof.speed.pass_s:.3g} s" in line for line in lines)


@pytest.mark.slow
def test_where_requests_share_passes_the_plan_counts_those_that_wait(tmp_path: Path) -> None:
    """Five products, 1 MiB of weights each, and 2 MiB between them that each of three requests holds."""
    names = ["x", "a", "b", "c", "d", "y"]
    nodes = [node("MatMul", [a, f"w{a}"], [b], name=f"to_{b}") for a, b in itertools.pairwise(names)]
    weights = [init(f"w{name}", normal(512, 512, seed=at)) for at, name in enumerate(names[:-1])]
    source = save(tmp_path, model(nodes, [value("x", ["n", 512])], [value("y", ["n", 512])], weights))
    shapes = (parse_shape("x=1..1024,512"),)
    options = Options(shapes=shapes, residency=Residency.STREAMED, slots=3, segments=5)
    out = tmp_path / "five.tfb"
    compile_model(source, load_board("raspberry-pi-5-4gb"), out, options)
    run = read_manifest(out).plan.phase("run")
    assert run.term("waiting") == Term("waiting", "anonymous", 3 * (2 * MIB + 4096))
    proof = prove(out, rounds=4)
    assert proof.verdict is Verdict.FITS, proof.reason
    assert proof.speed is not None
    assert proof.speed.requests == 12
    assert 4 <= proof.speed.passes < 12
    # The next one's first segment may be counted or not.
    assert abs(proof.speed.opened_bytes - 5 * MIB) <= MIB


def test_a_limit_far_too_small_ends_with_a_verdict(bundle: Path) -> None:
    done = command(str(bundle), "--limit", "48MiB")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not fit: " in done.stdout
    assert "48.0 MiB" in done.stdout
    assert "not reached" in done.stdout


def test_a_limit_that_the_engine_meets_while_it_loads(bundle: Path, fixed: Run, measured_before: None) -> None:
    needed = sum(peak.own.anonymous for peak in fixed.phases.values()) // len(fixed.phases)
    proof = prove(bundle, limit=needed + 6 * MIB, rounds=1)
    assert proof.verdict is Verdict.DOES_NOT_FIT
    if proof.exact:
        assert proof.oom_kills >= 1
        assert "OOM killer ended the" in proof.reason


def test_where_no_cgroup_can_be_made_the_limit_is_of_address_space(bundle: Path, measured_before: None) -> None:
    @contextlib.contextmanager
    def last_resort(nbytes: int) -> Iterator[Limit]:
        yield DataLimit(nbytes)

    warnings: list[str] = []

    class Heard(Progress):
        def warn(self, text: str) -> None:
            warnings.append(text)

    proof = prove(bundle, rounds=1, progress=Heard(), limiter=last_resort)
    assert (proof.verdict, proof.mechanism, proof.exact, proof.charged) == (Verdict.FITS, "RLIMIT_DATA", False, None)
    assert any("address space" in text for text in warnings)
    assert any("address space" in note for note in proof.notes)
    small = prove(bundle, limit=24 * MIB, limiter=last_resort)
    assert small.verdict is Verdict.DOES_NOT_FIT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.tfb"], "is not there"),
        (["{bundle}", "--limit", "3.4G"], "is not a size"),
        (["{bundle}", "--limit", "1"], "cannot be set"),
        (["{bundle}", "--rounds", "0"], "rounds"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bundle: Path, arguments: list[str], message: str) -> None:
    done = command(*(argument.format(bundle=bundle) for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    folder = add(tmp_path / "add.tfb")
    (folder / "segments" / "01.bin").write_bytes(b"\0" * 2048)
    with pytest.raises(BundleError, match=r"01\.bin was changed"):
        prove(folder)


# -- what a run means, without one


def run(*done: str, anonymous: int = 0, failure: str = "", kills: int = 0) -> Run:
    peak = Peak(Mapped(anonymous), Mapped(anonymous), (0, anonymous), 0, 1)
    killed = "engine" if kills else ""
    return Run(dict.fromkeys(("load", "run"), peak), done, None, kills, failure, killed)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> dict[str, Run]:
    """Runs that are said to have been seen."""
    runs = {"fixed": run("load", "run", anonymous=10 * MIB)}
    monkeypatch.setattr(module, "measure_fixed", lambda *_: runs["fixed"])
    monkeypatch.setattr(module, "run_service", lambda *_: runs["seen"])
    return runs


def test_more_than_the_plan_is_no_proof_though_it_ran(tmp_path: Path, pretended: dict[str, Run]) -> None:
    pretended["seen"] = run("load", "run", anonymous=40 * MIB)
    proof = prove(add(tmp_path / "add.tfb"))
    assert proof.verdict is Verdict.OVER_PLAN
    assert "30.0 MiB" in proof.reason


def test_nothing_is_allowed_for_noise(tmp_path: Path, pretended: dict[str, Run]) -> None:
    folder = add(tmp_path / "add.tfb")
    run_phase = read_manifest(folder).plan.phase("load")
    runtime = run_phase.term("runtime")
    assert runtime is not None
    most = 10 * MIB + run_phase.total_bytes - runtime.nbytes
    pretended["seen"] = run("load", "run", anonymous=most)
    assert prove(folder).verdict is Verdict.FITS
    pretended["seen"] = run("load", "run", anonymous=most + 1)
    assert prove(folder).verdict is Verdict.OVER_PLAN


def test_what_only_the_kernel_saw_counts_as_used(tmp_path: Path, pretended: dict[str, Run]) -> None:
    peak = Peak(Mapped(10 * MIB), Mapped(10 * MIB), (0, 10 * MIB), 20 * MIB, 1)
    seen = run("load", "run", anonymous=10 * MIB)
    pretended["seen"] = msgspec.structs.replace(seen, phases={**seen.phases, "load": peak})
    proof = prove(add(tmp_path / "add.tfb"))
    assert (proof.verdict, proof.phases[0].measured_total) == (Verdict.OVER_PLAN, 20 * MIB)


def test_of_three_measurements_of_the_runtime_the_middle_one_counts(
    tmp_path: Path, pretended: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter((12, 9, 10))
    monkeypatch.setattr(module, "measure_fixed", lambda *_: run("load", "run", anonymous=next(sizes) * MIB))
    pretended["seen"] = run("load", "run", anonymous=10 * MIB)
    proof = prove(add(tmp_path / "add.tfb"))
    assert proof.fixed.spread == 3 * MIB
    assert [phase.measured_total for phase in proof.phases] == [0, 0]


def test_an_unfinished_phase_shows_what_was_seen_until_then(tmp_path: Path, pretended: dict[str, Run]) -> None:
    pretended["seen"] = run("load", anonymous=90 * MIB, failure="503 engine is gone", kills=1)
    proof = prove(add(tmp_path / "add.tfb"))
    assert proof.verdict is Verdict.DOES_NOT_FIT
    assert proof.reason.startswith("the kernel's OOM killer ended the engine while it served requests")
    assert [phase.complete for phase in proof.phases] == [True, False]
    console = Console(record=True, width=120)
    print_proof(proof, console)
    assert "not finished" in console.export_text()


def test_an_agent_that_is_not_installed_is_named(tmp_path: Path, pretended: dict[str, Run]) -> None:
    pretended["seen"] = run(failure="aiohttp is not installed (pip install 'tightfit[agent,cpu]')")
    with pytest.raises(OptionError, match="aiohttp is not installed"):
        prove(add(tmp_path / "add.tfb"))


def test_a_refusal_that_has_nothing_to_do_with_memory_is_an_error(tmp_path: Path, pretended: dict[str, Run]) -> None:
    pretended["seen"] = run(failure="no backend")
    if not _exact():
        pytest.skip("without a cgroup a refusal cannot be told from a failed allocation")
    with pytest.raises(BudgetError, match="no backend"):
        prove(add(tmp_path / "add.tfb"))


def _exact() -> bool:
    with limited(64 * MIB) as limit:
        return limit.exact


def test_the_finalise_phase_is_judged_where_the_plan_has_one(tmp_path: Path, pretended: dict[str, Run]) -> None:
    folder = add(tmp_path / "add.tfb")
    manifest = read_manifest(folder)
    plan = manifest.plan
    phases = (msgspec.structs.replace(plan.phase("load"), name=FINALISE), *plan.phases)
    segments = tuple(msgspec.structs.replace(s, residency=Residency.MAPPED) for s in manifest.segments)
    changed = msgspec.structs.replace(manifest, plan=msgspec.structs.replace(plan, phases=phases), segments=segments)
    rewrite(folder, changed)
    seen = run(FINALISE, "load", "run", anonymous=11 * MIB)
    over = Peak(Mapped(50 * MIB), Mapped(50 * MIB), (0, 50 * MIB), 0, 1)
    pretended["seen"] = msgspec.structs.replace(seen, phases={**seen.phases, FINALISE: over})
    proof = prove(folder)
    assert [phase.name for phase in proof.phases] == [FINALISE, "load", "run"]
    assert (proof.verdict, "finalise needed" in proof.reason) == (Verdict.OVER_PLAN, True)


def test_ratios() -> None:
    assert ratio(110, 100) == 1.1
    assert ratio(110, 0) is None
    assert ratio(110, None) is None
    phase = PhaseProof("run", {"anonymous": 10}, {"anonymous": 9}, unseen=2)
    assert (phase.predicted_total, phase.measured_total, phase.holds) == (10, 11, False)
    assert PhaseProof("run", {"anonymous": 10}, None, complete=False).measured_total is None


def test_requests_are_of_the_largest_shape_and_of_every_type(tmp_path: Path) -> None:
    folder = every_type(tmp_path / "types.tfb")
    requests = Requests(folder, read_manifest(folder), 1)
    body, headers = requests.body(0), requests.headers
    head = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
    sizes = sum(entry["parameters"]["binary_data_size"] for entry in head["inputs"])
    assert len(body) == int(headers["Inference-Header-Content-Length"]) + sizes
    by_type = {entry["datatype"]: entry["parameters"]["binary_data_size"] for entry in head["inputs"]}
    assert by_type["FP32"] == 24
    assert by_type["BYTES"] == 6 * 64
    two = add(tmp_path / "add.tfb")
    requests = Requests(two, read_manifest(two), 1)
    body, headers = requests.body(0), requests.headers
    head = json.loads(body[: int(headers["Inference-Header-Content-Length"])])
    assert [entry["shape"] for entry in head["inputs"]] == [[4, 8], [4, 8]]


def test_requests_touch_a_table_evenly_and_each_other_rows(tmp_path: Path) -> None:
    nodes = [node("Cast", ["i"], ["c"], to=7), node("Gather", ["t", "c"], ["y"])]
    inputs, outputs = [value("i", [5], 6)], [value("y", [5, 64])]
    source = save(tmp_path, model(nodes, inputs, outputs, [init("t", normal(100, 64))]))
    compile_model(source, load_board("raspberry-pi-5-4gb"), tmp_path / "table.tfb", Options())
    requests = Requests(tmp_path / "table.tfb", read_manifest(tmp_path / "table.tfb"), 4)
    head = int(requests.headers["Inference-Header-Content-Length"])
    rows = [np.frombuffer(requests.body(number)[head:], np.int32) for number in range(4)]
    assert sorted(np.concatenate(rows)) == list(range(0, 100, 5))
    assert all(np.diff(each).min() == 20 for each in rows)


def test_a_type_that_the_protocol_lacks_is_named(tmp_path: Path) -> None:
    folder = add(tmp_path / "add.tfb")
    manifest = read_manifest(folder)
    inputs = tuple(msgspec.structs.replace(spec, dtype=DType.INT4) for spec in manifest.contract.inputs)
    changed: Manifest = msgspec.structs.replace(
        manifest, contract=msgspec.structs.replace(manifest.contract, inputs=inputs)
    )
    with pytest.raises(OptionError, match="cannot be sent"):
        Requests(folder, changed, 1)


def test_the_json_is_whole(tmp_path: Path, pretended: dict[str, Run]) -> None:
    pretended["seen"] = run("load", "run", anonymous=11 * MIB)
    fields = json.loads(proof_json(prove(add(tmp_path / "add.tfb"))))
    assert fields["phases"][1]["measured"] == {"anonymous": MIB, "file": 0, "shared": 0}
    assert fields["phases"][1]["anonymous"] == {"gateway": 0, "engine": MIB}
    assert fields["phases"][1]["ratio"] == ratio(fields["phases"][1]["predicted_total"], MIB)
