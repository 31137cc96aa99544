"""Board files: those that ship, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from targets.board import (
    board_names,
    board_source,
    figure_notes,
    load_board,
    parse_board,
    unsourced_figures,
)
from targets.errors import BoardError

RASPBERRY = board_source("raspberry-pi-5-4gb")[1]


def edit(old: str, new: str) -> str:
    assert RASPBERRY.count(old) == 1, f"{old!r} must stand once in the board file"
    return RASPBERRY.replace(old, new)


def test_the_promised_boards_ship() -> None:
    assert board_names() == [
        "generic-lpddr4x-4gb",
        "jetson-orin-nano-4gb",
        "jetson-xavier-nx-8gb",
        "raspberry-pi-5-4gb",
        "x86-64-dev",
    ]


@pytest.mark.parametrize("name", board_names())
def test_shipped_boards_are_valid_and_every_figure_says_where_it_is_from(name: str) -> None:
    board = load_board(name)
    assert board.name == name
    assert board.memory.contiguous_ceiling_mib <= board.memory.mem_total_mib
    assert unsourced_figures(board_source(name)[1]) == []
    assert bool(board.runtime.sm) == (board.runtime.name == "tensorrt")


def test_physical_facts() -> None:
    orin = load_board("jetson-orin-nano-4gb")
    assert orin.memory.kind == "LPDDR5"
    assert orin.compute["int8"] == 10_000
    assert orin.runtime.sm == "8.7"
    assert load_board("raspberry-pi-5-4gb").memory.kind == "LPDDR4X-4267"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("physical_mib = 4096", "physcal_mib = 4096", "did you mean 'physical_mib'"),
        ("[power]", "[pwer]", "did you mean 'power'"),
        ("cores = 4", "cores = 0", "cores must be a number above zero, not 0"),
        ("cores = 4", 'cores = "four"', "Expected `int`, got `str`"),
        ("cores = 4", "cores = true", "Expected `int`, got `bool`"),
        ("schema = 1", "schema = 2", "schema 2 is not known; available: 1"),
        ("schema = 1", 'schema = 1\nname = "x"', "unexpected key 'name'"),
        ("mem_total_mib = 4045", "mem_total_mib = 5000", "cannot exceed physical_mib"),
        ("os_reserve_mib = 400", "os_reserve_mib = 3900", "leave nothing of mem_total_mib"),
        ("os_reserve_mib = 400", "os_reserve_mib = -400", "os_reserve_mib must be a number above zero"),
        ("dram_gb_s = 17.1", "dram_gb_s = inf", "dram_gb_s must be a number above zero, not inf"),
        ("dram_gb_s = 17.1", "dram_gb_s = nan", "dram_gb_s must be a number above zero, not nan"),
        ("idle_w = 2.7", "idle_w = 27", "idle_w cannot exceed max_w"),
        ("usd = 60", "usd = 0", "usd must be a number above zero"),
        ("int8 = 614.4", "int9 = 614.4", "did you mean 'int8'"),
        ("int8 = 614.4", "int8 = -1", "int8 must be a number above zero"),
        ('["float32", ', '["floot32", ', "did you mean 'float32'"),
        ('name = "onnxruntime"', 'name = "ncnn"', "unknown runtime 'ncnn'; available: onnxruntime, tensorrt"),
        ("max_opset = 28", "max_opset = -1", "max_opset must be a number above zero"),
        ("[bandwidth]", "[bandwidth", "is not valid TOML"),
    ],
)
def test_a_wrong_board_is_refused_in_one_line(old: str, new: str, message: str) -> None:
    with pytest.raises(BoardError) as caught:
        parse_board(edit(old, new), "mine")
    assert message in str(caught.value)
    assert "'mine'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_table_is_named() -> None:
    with pytest.raises(BoardError, match="price"):
        parse_board(RASPBERRY.split("[price]", maxsplit=1)[0], "mine")


def test_an_unknown_board_lists_the_known_and_says_that_a_file_will_do() -> None:
    with pytest.raises(BoardError, match=r"did you mean 'raspberry-pi-5-4gb'.*or a \.toml file"):
        load_board("raspbery-pi-5-4gb")


def test_a_board_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(edit('title = "Raspberry Pi 5, 4 GB"', 'title = "Mine"'))
    assert (load_board(str(path)).name, load_board(str(path)).title) == ("own", "Mine")


def test_a_board_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BoardError, match="No such file"):
        load_board(str(tmp_path / "none.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(BoardError, match="Is a directory"):
        load_board(str(folder))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BoardError, match="utf-8"):
        load_board(str(binary))


@pytest.mark.parametrize(
    "line",
    [
        "usd = 60",
        "usd = 60 # launch price",
        "usd = 60 # source:",
        "usd = 60 # no source",
        "usd = +6.0e1 # TODO",
        "usd = 6_0",
        "usd = 0x3c",
    ],
)
def test_a_figure_without_a_source_is_found(line: str) -> None:
    head, _, _ = RASPBERRY.partition("usd = ")
    assert unsourced_figures(head + line + "\n") == ["price.usd"]


def test_figures_in_inline_tables_do_not_escape() -> None:
    head, _, _ = RASPBERRY.partition("[price]")
    text = "price = { usd = 60 } # source: a shop\n" + head
    parse_board(text, "mine")
    assert unsourced_figures(text) == ["price.usd"]


def test_notes_stand_under_the_full_key() -> None:
    notes = figure_notes(RASPBERRY)
    assert notes["bandwidth.dram_gb_s"].startswith("source: 32 bit x 4267 MT/s")
    assert notes["compute.int8"].startswith("assumed:")
    assert "schema" not in notes
