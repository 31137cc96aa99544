"""report.html and `inspect --plan`: what stands on them, and what a browser makes of the page."""

from __future__ import annotations

import html.parser
import io
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from compile import picture
from compile.packing.place import place
from compile.page import page
from compile.partition.cuts import Cuts
from compile.report import print_plan
from targets.arena import Arena, Buffer, Placed
from targets.board import MIB, load_board
from targets.budget import MemoryPlan, Phase, Sweep, Term, budget_bytes
from targets.bundle import (
    LeftAlone,
    Manifest,
    OutputError,
    Quantization,
    Residency,
    Segment,
    SegmentError,
    Source,
    Verification,
)
from targets.tensor import Contract, DimRange, DType, TensorSpec

BOARD = load_board("raspberry-pi-5-4gb")
HOSTILE = "<script>alert('x')</script>"
STREAMED, MAPPED = Residency.STREAMED, Residency.MAPPED
CONTRACT = Contract(
    (TensorSpec("x", DType.FLOAT32, ("rows", 512), 64 * 512 * 4),),
    (TensorSpec(HOSTILE, DType.FLOAT32, ("rows", 8), 64 * 8 * 4),),
    {"rows": DimRange(1, 8, 64)},
)
SEGMENTS = tuple(
    Segment(f"segments/{step:02d}.onnx", ("x",), ("y",), {}, residency)
    for step, residency in enumerate((STREAMED, MAPPED, STREAMED, MAPPED, STREAMED))
)
QUANTIZATION = Quantization(
    "int4", {"MatMul": 12}, (LeftAlone("Conv", 3, 5 * MIB, f"too small {HOSTILE}"),), 900 * MIB, 200 * MIB
)
VERIFICATION = Verification(
    "random",
    4,
    (OutputError(HOSTILE, 0.5, 0.25, 0.99, 0.875),),
    tuple(SegmentError(s.file, 0.1, 0.2) for s in SEGMENTS),
)
ARENA = place([Buffer(f"b{at}", at, at + 2 + at % 3, (1 + at % 5) * MIB) for at in range(40)])
SWEEP = Sweep((0, 2, 4), (100 * MIB, 80 * MIB, 60 * MIB, 90 * MIB, 70 * MIB), 170 * MIB, 400 * MIB, 0)
PLAN = MemoryPlan(
    budget_bytes(BOARD),
    2,
    (
        Phase("finalise", (Term("runtime", "anonymous", 150 * MIB), Term("weights", "anonymous", 99 * MIB))),
        Phase("load", (Term("runtime", "anonymous", 150 * MIB), Term("weights", "anonymous", 9 * MIB))),
        Phase(
            "run",
            (
                Term("runtime", "anonymous", 150 * MIB),
                Term("mapped_weights", "file", 170 * MIB),
                Term("ring", "shared", 160 * MIB),
                Term("io_slots", "shared", 3 * MIB),
                Term("activations", "anonymous", ARENA.height),
            ),
        ),
    ),
    ARENA,
    SWEEP,
)
WARNINGS = ["Verified on random inputs.", HOSTILE]


def made(plan: MemoryPlan = PLAN, segments: tuple[Segment, ...] = SEGMENTS) -> str:
    options = {"scheme": "int4", "note": HOSTILE, "empty": ""}
    return page("a.model", BOARD, options, CONTRACT, segments, QUANTIZATION, VERIFICATION, plan, WARNINGS).decode()


class Elements(html.parser.HTMLParser):
    """Tags as they open, and whether each closes where it should."""

    VOID = frozenset({"meta", "rect", "line", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def finished(self) -> bool:
        return not self._open


def elements(text: str) -> Elements:
    found = Elements()
    found.feed(text)
    assert found.finished()
    return found


def test_the_page_holds_every_figure() -> None:
    found = elements(made())
    for wanted in (
        "a.model",
        BOARD.title,
        "12",
        "left: too small",
        "0.25",
        "0.875",
        "x float32[rows,512]",
        "160.0 MiB",
        "A pass reads 170.0 MiB of 400.0 MiB",
        "would read 400.0 MiB",
        "segments/04.onnx",
        "streamed",
        "scheme=int4",
        *WARNINGS,
    ):
        assert wanted in re.sub(r"\s+", " ", found.text), wanted
    assert "empty=" not in found.text


def test_the_page_needs_no_network_and_runs_nothing_of_the_model() -> None:
    text = made()
    found = elements(text)
    assert "script" not in {tag for tag, _ in found.tags}
    assert not re.search(r"( src=| href=|url\(|https?:)", text)
    assert any(tag == "meta" and "default-src 'none'" in (a.get("content") or "") for tag, a in found.tags)


def test_how_the_segments_were_chosen_is_told() -> None:
    cuts = Cuts((1, 2, 3, 4, 5), 2_000_000, (2, 5), 3_000_000, 1_500_000, exact=True)
    options: dict[str, str] = {}
    text = page("m", BOARD, options, CONTRACT, SEGMENTS, QUANTIZATION, VERIFICATION, PLAN, [], cuts).decode()
    shown = re.sub(r"\s+", " ", elements(text).text)
    assert "by the board's figures: 2 ms. Filling one segment after the other would cost 3 ms; no cuts" in shown
    assert "less than 1.5 ms" in shown


def test_equal_bundles_have_equal_pages() -> None:
    assert made() == made()


def test_a_plan_without_turns_and_a_model_without_activations() -> None:
    plan = msgspec.structs.replace(PLAN, sweep=None, arena=Arena(0, 0, 256, ()))
    found = elements(made(plan, SEGMENTS[:1]))
    assert "Segments" not in found.text
    assert "A pass reads" not in found.text


def test_columns_are_the_plans_bytes() -> None:
    columns = picture.columns(PLAN, [str(step) for step in range(5)])
    assert [column.label for column in columns] == ["finalise", "load", *(f"run {step}" for step in range(5))]
    assert columns[0].nbytes == PLAN.phases[0].total_bytes
    staying, others = 170 * MIB, 153 * MIB + ARENA.height
    # What is not used of the ring is there all the same.
    assert [column.nbytes for column in columns[2:]] == [others + staying + 160 * MIB] * 5
    weights = [[each.nbytes // MIB for each in column.slices if "weights" in each.name] for column in columns[2:]]
    # The first has the place of the last.
    assert weights == [[170, 100, 60], [170, 60], [170, 60, 70], [170, 70], [170, 70]]
    assert columns[2].of("shared") == (3 + 160) * MIB


def test_what_is_live_peaks_at_the_lower_bound() -> None:
    profile = picture.live(ARENA)
    assert max(each.nbytes for each in profile) == ARENA.lower_bound
    assert all(a.end == b.start and a.nbytes != b.nbytes for a, b in itertools.pairwise(profile))
    assert sum(each.nbytes * (each.end - each.start) for each in profile) == sum(
        buffer.nbytes * (buffer.upper - buffer.lower) for buffer in ARENA.buffers
    )


def test_of_very_many_buffers_the_largest_are_drawn() -> None:
    small = tuple(Placed(f"s{at}", at, at + 1, 256, 0) for at in range(picture.MOST_BUFFERS))
    large = Placed("large", 0, 5000, 4096, 256)
    arena = Arena(4352, 4352, 256, (*small, large))
    assert large in picture.largest_buffers(arena)
    assert len(picture.largest_buffers(arena)) == picture.MOST_BUFFERS
    text = made(msgspec.structs.replace(PLAN, arena=arena))
    assert f"the {picture.MOST_BUFFERS} largest are drawn" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_plan_is_drawn_on_a_terminal(width: int) -> None:
    manifest = Manifest(
        schema=1,
        name="a.model",
        target=BOARD.name,
        runtime=BOARD.runtime.name,
        source=Source("a.onnx", "0" * 64, "0" * 64),
        contract=CONTRACT,
        segments=SEGMENTS,
        plan=PLAN,
        quantization=QUANTIZATION,
        verification=VERIFICATION,
        sample=(),
        assets=(),
        options={},
        tools={},
        files=(),
    )
    out = io.StringIO()
    print_plan(manifest, Console(file=out, width=width, color_system=None))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    bars = [re.match(r"(finalise|load|run \d\d) +(█*)", line) for line in lines]
    drawn = {bar[1]: len(bar[2]) for bar in bars if bar}
    assert len(drawn) == 7
    assert drawn["run 00"] >= drawn["run 01"] >= drawn["finalise"] >= drawn["load"]
    assert width < 80 or drawn["run 00"] > drawn["load"] > 0
    assert "a pass reads 170.0 MiB of 400.0 MiB" in " ".join(lines)
    # The highest of what is live reaches the top of its drawing, the arena's height being the lower bound here.
    assert ARENA.height == ARENA.lower_bound
    assert "█" in lines[-8]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MEASURE = """<iframe src="report.html" style="width: {width}px; height: 900px; border: 0"></iframe>
<script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument
  const drawn = [...page.querySelectorAll("rect")].filter(each => each.getBoundingClientRect().width > 0)
  document.title = [page.documentElement.scrollWidth, drawn.length, page.fonts.status].join(" ")
}})
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_the_page_whole_on_a_phone_and_on_a_desk(tmp_path: Path, width: int) -> None:
    text = made()
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    (tmp_path / "measure.html").write_text(MEASURE.format(width=width), encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom",
            str(tmp_path / "measure.html"),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(\d+) (\d+) ", done.stdout)
    assert title is not None, done.stdout
    assert int(title[1]) <= width
    assert int(title[2]) == text.count("<rect")
