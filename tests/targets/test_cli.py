"""`tightfit-targets`: what it prints, and one clear line for each bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from targets.__main__ import main
from targets.board import board_names, board_source


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "list")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == board_names()


def test_list_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert list(rows) == board_names()
    generic = rows["generic-lpddr4x-4gb"]
    assert generic["budget_bytes"] == generic["runtime_fixed_bytes"] + generic["model_bytes"]
    assert generic["budget_bytes"] >> 20 == 3481


def test_show_marks_what_is_assumed_and_ends_with_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "show", "generic-lpddr4x-4gb")
    lines = {line[2:28].strip(): line for line in out.splitlines()}
    assert status == 0
    assert lines["memory bandwidth"][28] == "*"
    assert lines["newest opset"][28] == " "
    assert "budget of the service, M             3.4 GiB" in out
    assert out.splitlines()[-1].startswith("  left for the model")


def test_show_json_holds_the_board_and_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "jetson-orin-nano-4gb", "--json")
    shown = json.loads(out)
    assert shown["memory"]["kind"] == "LPDDR5"
    assert shown["runtime"]["dtypes"][0] == "float32"
    assert shown["notes"]["compute.int8"].startswith("source: data sheet")


def test_show_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(board_source("x86-64-dev")[1])
    status, out, _ = run(capsys, "show", str(path))
    assert status == 0
    assert out.startswith("own: ")


def test_check_without_arguments_takes_the_shipped_boards(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "check")
    assert (status, err) == (0, "")
    assert [line.split(":")[0] for line in out.splitlines()] == board_names()


def test_check_reports_every_problem_on_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    unsourced = tmp_path / "unsourced.toml"
    head, _, _ = board_source("x86-64-dev")[1].partition("[power]")
    unsourced.write_text(head + "[power]\nidle_w = 1\nmax_w = 2 # assumed: mine\n[price]\nusd = 3 # cheap\n")
    broken = tmp_path / "broken.toml"
    broken.write_text('schema = 1\n"a\\nb" = 1\n')
    status, out, err = run(capsys, "check", str(unsourced), str(broken), "none", "x86-64-dev")
    lines = err.splitlines()
    assert status == 2
    assert len(lines) == 4
    assert all(line.startswith("tightfit-targets: error: board") or "unknown board 'none'" in line for line in lines)
    assert "power.idle_w has no source" in lines[0]
    assert "price.usd has no source" in lines[1]
    assert out == "x86-64-dev: ok, 13.1 GiB for models\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "raspbery-pi-5-4gb"), "did you mean 'raspberry-pi-5-4gb'"),
        (("show", "none.toml"), "cannot read board file none.toml: No such file"),
        (("show",), "required: BOARD_OR_FILE"),
        (("paint",), "invalid choice: 'paint'"),
        ((), "required: COMMAND"),
        (("list", "--yaml"), "unrecognized arguments: --yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("tightfit-targets: error: ")
    assert message in err


@pytest.mark.parametrize("command", [(), ("show",), ("check",)])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    status, out, _ = run(capsys, *command, "--help")
    assert status == 0
    assert "examples:\n  tightfit-targets" in out


def test_it_runs_as_a_module_and_a_closed_pipe_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "targets", "show", "x86-64-dev", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode in (0, 120)  # 120: Python could not flush what nobody reads
