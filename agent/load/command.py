"""The command line of bench: reads the options, runs rate after rate, prints and writes what was measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from yarl import URL

from agent.load.arrivals import Share, Spacing, arrivals, picks
from agent.load.client import MAX_CONNECTIONS, Client, metadata_of, run, session_of
from agent.load.credentials import Credentials
from agent.load.plot import Line, plot
from agent.load.report import Report, Run, Slo, run_of, table
from agent.load.samples import MAX_BYTES, Form, Kind, Metadata, file_messages, random_messages, read_inputs
from agent.load.streams import Streams
from targets.errors import TightfitError

_MODEL_URL = re.compile(r"(https?://[^/?#]+)(/v2/models/[^/?#]+(?:/versions/[^/?#]+)?)/?")
_LOADS = "50%,80%,120%"
# Long enough for a mean, whatever the duration of a rate.
_CAPACITY_S = 5.0
_METADATA_S = 10.0
_MAX_RATE = 100_000.0
EXAMPLES = (
    "Examples: tightfit-agent bench http://127.0.0.1:8080/v2/models/ocr --samples lines/ --load 50%,80%,120%"
    " | tightfit-agent bench URL --shape x=1,3,48,320..640 --rate 50,80 --deadline 100 --slo p99=80ms --plot rec.svg"
    " | tightfit-agent bench URL --mix normal=60:normal/ --mix dark=15:dark/ --rate 20 --json-output dark.json"
    " | tightfit-agent bench URL --stream --rate 200 --connections 8 --deadline 50"
)


@dataclass(frozen=True)
class Plan:
    """What to measure; `loads` are shares of the capacity, and only then is that measured."""

    base: URL
    path: str
    rates: tuple[float, ...]
    loads: tuple[float, ...]
    duration_s: float | None
    requests: int | None
    warmup_s: float
    connections: int
    spacing: Spacing
    stream: bool
    timeout_s: float
    deadline_s: float | None
    priority: int | None
    tensors: str | None
    shapes: Mapping[str, str]
    inputs: Mapping[str, str]
    mix: tuple[tuple[str, float, Path], ...]
    slos: tuple[Slo, ...]
    seed: int
    credentials: Credentials


def bench(
    url: Annotated[str, typer.Argument(help="The model: http[s]://HOST:PORT/v2/models/NAME, of any server.")],
    *,
    rate: Annotated[str, typer.Option(help="Requests a second; several are measured one by one: 50,80,120.")] = "",
    load: Annotated[
        str, typer.Option(help=f"Rates as shares of the capacity, which is measured first, in closed loop [{_LOADS}].")
    ] = "",
    duration: Annotated[float | None, typer.Option(help="Seconds of each rate [10].")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of each rate, instead of --duration.")] = None,
    warmup: Annotated[float, typer.Option(min=0, max=3600, help="Seconds at each rate before it counts.")] = 1.0,
    connections: Annotated[
        int,
        typer.Option(min=1, max=MAX_CONNECTIONS, help="At most; where all are busy a request waits, and it counts."),
    ] = 32,
    spacing: Annotated[Spacing, typer.Option("--arrivals", help="Random, as of many clients, or even.")] = (
        Spacing.POISSON
    ),
    stream: Annotated[
        bool, typer.Option("--stream", help="Send records of streams, one at a time on each connection.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Give a request up so many seconds after it was due.")
    ] = 10.0,
    deadline: Annotated[
        float | None, typer.Option(min=0.001, help="Milliseconds; sent as `timeout`, and what comes later is not good.")
    ] = None,
    priority: Annotated[int | None, typer.Option(min=0, help="Sent as `priority`; 1 is the highest.")] = None,
    tensors: Annotated[str, typer.Option(help="binary or json [binary where the server takes it].")] = "",
    shape: Annotated[
        list[str] | None, typer.Option(help="Sizes of a random input, NAME=1,3,48,320..640; for more inputs again.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="Values of an input, NAME=FILE.npy; for more inputs again.")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="A file or folder of .npy, .npz, .jpg or .png to send instead of random values.")
    ] = None,
    mix: Annotated[
        list[str] | None, typer.Option(help="NAME=WEIGHT:PATH, samples that are reported apart; give several.")
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option(help="Exit with 1 unless kept at every rate: p99=50ms, p99.9=0.2s, max=1s.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, values and choices.")] = 0,
    ca: Annotated[Path | None, typer.Option(help="Authorities to trust, PEM, instead of the system's.")] = None,
    cert: Annotated[Path | None, typer.Option(help="Certificate to show, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    token: Annotated[
        str,
        typer.Option(envvar="TIGHTFIT_TOKEN", help="Bearer token; the environment hides it from others."),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    json_output: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    svg: Annotated[Path | None, typer.Option("--plot", help="Draw latency by percentile, FILE.svg.")] = None,
) -> None:
    """Load a server at given rates and say what it answered, how fast, and what it refused.

    Arrivals are scheduled ahead and latency counts from when a request was due, so that a server that stands still is
    charged for every request that it kept from being sent. Exit code 1: an --slo was missed, nothing was answered, or
    Ctrl-C.
    """
    base, path = _model_url(url)
    if rate and load:
        raise TightfitError("--rate and --load are both given", "give rates, or shares of the capacity")
    if requests is not None and duration is not None:
        raise TightfitError("--requests and --duration are both given", "give one of them")
    if samples and mix:
        raise TightfitError("--samples and --mix are both given", "give each kind of sample as a --mix")
    if tensors not in ("", "binary", "json"):
        raise TightfitError(f"--tensors {tensors!r}", "binary or json")
    for file in (json_output, svg):
        if file is not None and not file.absolute().parent.is_dir():
            raise TightfitError(f"cannot write {file}: its folder is not there")
    plan = Plan(
        base=base,
        path=path,
        rates=_numbers("--rate", rate, 0.001, _MAX_RATE) if rate else (),
        loads=() if rate else _numbers("--load", load or _LOADS, 0.01, 10.0),
        duration_s=None if requests is not None else _seconds(10.0 if duration is None else duration),
        requests=requests,
        warmup_s=warmup,
        connections=connections,
        spacing=spacing,
        stream=stream,
        timeout_s=timeout,
        deadline_s=None if deadline is None else deadline / 1e3,
        priority=priority,
        tensors=tensors or None,
        shapes=_pairs("--shape", shape or []),
        inputs=_pairs("--input", inputs or []),
        mix=(("all", 1.0, samples),) if samples else _mix(mix or []),
        slos=tuple(map(Slo.parse, slo or [])),
        seed=seed,
        credentials=Credentials(ca, cert, key, token),
    )
    _check_times(plan)
    report, lines = run(lambda stop: _measure(plan, stop))
    _write(report, lines, json, json_output, svg)
    if not report.passed:
        raise typer.Exit(1)


def _check_times(plan: Plan) -> None:
    given = [("--deadline", plan.deadline_s or 0.0), *((f"--slo {slo.text}", slo.limit_s) for slo in plan.slos)]
    for name, seconds in given:
        if seconds > plan.timeout_s:
            raise TightfitError(
                f"{name} is longer than requests are waited for ({plan.timeout_s:g} s)", "give a larger --timeout"
            )


async def _measure(plan: Plan, stop: asyncio.Event) -> tuple[Report, list[Line]]:
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(session_of(plan.connections, plan.credentials))
        metadata, takes_binary = await metadata_of(session, plan.base, plan.path, _METADATA_S)
        binary = takes_binary if plan.tensors is None else plan.tensors == "binary"
        form = Form(f"{plan.path}/infer", binary, _parameters(plan), image_path=not plan.stream)
        kinds = _kinds(plan, metadata, form)
        streams = None
        if plan.stream:
            streams = Streams(session, plan.base.join(URL(f"{plan.path}/stream", encoded=True)))
            stack.callback(streams.close)
        client = Client(session, plan.base, kinds, plan.connections, plan.timeout_s, streams)
        mix = [Share(kind.weight, len(kind.messages)) for kind in kinds]
        capacity: float | None = None
        used: int | None = None
        rates: Sequence[tuple[float, float | None]] = [(rate, None) for rate in plan.rates]
        if plan.loads:
            _note(f"measuring the capacity in closed loop: {plan.connections} connections, {_CAPACITY_S:g} s")
            await client.capacity(picks(mix, plan.seed), plan.warmup_s, stop)
            capacity, used = await client.capacity(picks(mix, plan.seed), _CAPACITY_S, stop)
            if not capacity and not stop.is_set():
                raise TightfitError("nothing was answered in closed loop", "see what --rate 1 says of the server")
            rates = [(share * capacity, share) for share in plan.loads]
        runs: list[Run] = []
        lines: list[Line] = []
        for rate, share in rates:
            if stop.is_set():
                break
            for_how_long = f"{plan.duration_s:g} s" if plan.duration_s is not None else f"{plan.requests} requests"
            _note(f"measuring at {rate:.4g}/s: {plan.warmup_s:g} s to warm up, {for_how_long}")
            picked = picks(mix, plan.seed)
            schedule = arrivals(
                rate, plan.spacing, plan.warmup_s, plan.duration_s or 0.0, plan.requests, picked, plan.seed
            )
            measured = await client.measure(schedule, plan.warmup_s, plan.deadline_s, stop)
            figures, total = run_of(rate, share, plan.duration_s, [k.name for k in kinds], measured, plan.slos)
            runs.append(figures)
            name = f"{rate:.4g}/s" + (f" ({share:.0%})" if share else "")
            lines.append(Line(name, total.latency, total.unanswered))
    report = Report(
        url=f"{plan.base}".rstrip("/") + plan.path,
        model=metadata.name,
        versions=metadata.versions,
        tensors="binary" if binary else "json",
        stream=plan.stream,
        arrivals=plan.spacing.value,
        seed=plan.seed,
        connections=plan.connections,
        timeout_s=plan.timeout_s,
        deadline_ms=None if plan.deadline_s is None else plan.deadline_s * 1e3,
        trace=client.trace,
        mix={kind.name: kind.weight for kind in kinds},
        capacity_per_s=capacity,
        capacity_connections=used,
        runs=runs,
        interrupted=stop.is_set(),
    )
    return report, lines


def _parameters(plan: Plan) -> dict[str, int]:
    """As Triton has them, and the agent: `timeout` in microseconds."""
    parameters = {}
    if plan.deadline_s is not None:
        parameters["timeout"] = max(round(plan.deadline_s * 1e6), 1)
    if plan.priority is not None:
        parameters["priority"] = plan.priority
    return parameters


def _kinds(plan: Plan, metadata: Metadata, form: Form) -> list[Kind]:
    given = read_inputs(plan.inputs, metadata)
    if not plan.mix:
        return [Kind("all", 1.0, random_messages(metadata, form, plan.shapes, given, plan.seed))]
    if plan.shapes:
        raise TightfitError("--shape is for random values, and samples are given", "leave one of them out")
    kinds = []
    for name, weight, path in plan.mix:
        messages, left_out = file_messages(path, metadata, form, given, plan.seed, MAX_BYTES // len(plan.mix))
        if left_out:
            _note(f"{path}: {len(messages)} samples fill the memory for them, {left_out} others are not sent")
        kinds.append(Kind(name, weight, messages))
    return kinds


# --- options


def _model_url(url: str) -> tuple[URL, str]:
    match = _MODEL_URL.fullmatch(url)
    try:
        if match is None:
            raise ValueError
        return URL(match[1]), match[2]
    except ValueError:
        raise TightfitError(f"{url!r} is no model's URL", "write http://HOST:PORT/v2/models/NAME") from None


def _numbers(option: str, text: str, least: float, most: float) -> tuple[float, ...]:
    """`50,80` or `50%,80%`; percentages are needed where the option is --load."""
    numbers = []
    for word in text.split(","):
        percent = word.strip().endswith("%")
        try:
            number = float(word.strip().removesuffix("%")) / (100 if percent else 1)
        except ValueError:
            number = -1.0
        if percent != (option == "--load") or not least <= number <= most:
            example = "50%,80%,120% (1% to 1000%)" if option == "--load" else f"50,80,120 ({least:g} to {most:g})"
            raise TightfitError(f"{option} {word.strip()!r}", f"write numbers such as {example}")
        numbers.append(number)
    return tuple(numbers)


def _seconds(duration: float) -> float:
    if not 0 < duration <= 86_400:
        raise TightfitError(f"--duration {duration:g}", "write seconds, at most a day")
    return duration


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or name in pairs:
            raise TightfitError(f"{option} {text!r}", "write NAME=VALUE, once for each name")
        pairs[name] = value
    return pairs


def _mix(texts: Sequence[str]) -> tuple[tuple[str, float, Path], ...]:
    found = []
    for name, value in _pairs("--mix", texts).items():
        weight, colon, path = value.partition(":")
        try:
            number = float(weight)
        except ValueError:
            number = 0.0
        if not colon or not path or not 0 < number < 1e9:
            raise TightfitError(f"--mix {name}={value}", "write NAME=WEIGHT:PATH, for example dark=15:dark/")
        found.append((name, number, Path(path)))
    return tuple(found)


# --- what is written


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _write(report: Report, lines: Sequence[Line], json: bool, json_output: Path | None, svg: Path | None) -> None:
    text = msgspec.json.encode(report)
    sys.stdout.write((text.decode() if json else table(report)) + "\n")
    sys.stdout.flush()
    if json_output:
        _replace(json_output, text + b"\n")
    if svg:
        _replace(svg, plot(f"{report.model}: latency from when a request was due", lines, report.deadline_ms).encode())


def _replace(path: Path, data: bytes) -> None:
    """All of it or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TightfitError(f"cannot write {path}: {error.strerror or error}") from None
