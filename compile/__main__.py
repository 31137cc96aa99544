"""tightfit-compile: an ONNX model and a board in, a bundle that provably fits out."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from compile.quantize.schemes import SCHEMES
from targets.board import load_board
from targets.bundle import Residency, read_manifest, verify_files
from targets.errors import TightfitError, did_you_mean
from targets.recipe import load_recipe
from targets.tensor import human, parse_size

PROGRAM = "tightfit-compile"
# What typer makes of an interrupt.
_INTERRUPTED = 130
# The base of typer's complaints about arguments. typer brings its own copy of click, so it is not named click's.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.command("compile")
def compile_command(
    model: Annotated[Path, typer.Argument(help="ONNX file; external data beside it is mapped, not read into memory.")],
    target: Annotated[str, typer.Option(help="Board name (tightfit-targets list) or a board's .toml file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Bundle to write, NAME.tfb.")],
    scheme: Annotated[
        str, typer.Option(help="; ".join(f"{each.name}: {each.summary}" for each in SCHEMES.values()))
    ] = "fp32",
    block: Annotated[
        int | None, typer.Option(help="Weights that share a scale: 32, 64 or 128. int4: 32, int8-weights: 64.")
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--zero-points", help="Zero points for blocks: int4 has them, int8-weights not."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Range of an input's dynamic axes: x=1,3,48,320..1600 (MIN..MAX or MIN..OPT..MAX); or of one "
            "dimension by its name: batch=1..8. Requests are grouped by size: 320/480/640 in the place of MAX says how."
        ),
    ] = None,
    batch_axis: Annotated[
        str, typer.Option(help="Dimension along which requests can be put together; by default it is found.")
    ] = "",
    pad: Annotated[
        str,
        typer.Option(
            help="Dimension along which requests of one bucket may differ and run together, the shorter filled up with "
            "zeros: masked, so that it makes no difference, which is tried on the source model."
        ),
    ] = "",
    split: Annotated[
        str,
        typer.Option(
            help="DIMENSION=LONGEST/OVERLAP: sequences of up to LONGEST are run in windows of the range's largest "
            "size, of which neighbours share OVERLAP. What that changes is measured on the source model."
        ),
    ] = "",
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="INPUT=OUTPUT: what OUTPUT gives is INPUT of the next run. Pairs that are named as exporters do "
            "(past_key_values.0.key and present.0.key) are found; where the past grows its --shape is 0..LONGEST."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json of a language model, generation_config.json beside it: the agent then generates text."
        ),
    ] = None,
    calib: Annotated[
        Path | None,
        typer.Option(help="Samples to calibrate and verify on: .npz, .npy, .bin, .raw, .jsonl, images, or a folder."),
    ] = None,
    calibrate_with: Annotated[
        str, typer.Option(help="How int8-static finds ranges: minmax, percentile, entropy or mse.")
    ] = "percentile",
    random: Annotated[bool, typer.Option("--random", help="Calibrate on random values: guesses, no ranges.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="At most so many samples to verify on.")] = 8,
    name: Annotated[str, typer.Option(help="Model name that clients use; by default the file's.")] = "",
    asset: Annotated[list[Path] | None, typer.Option(help="File to carry in the bundle (labels, alphabet).")] = None,
    slots: Annotated[
        str, typer.Option(help="Requests in memory at once, 1 to 256; auto: up to 32, as the board has room.")
    ] = "auto",
    max_error: Annotated[float | None, typer.Option(help="Fail when an output's relative L2 exceeds this.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing bundle of that name.")] = False,
    host_memory: Annotated[
        str, typer.Option(help="Memory that compiling may take, whatever the model's size.")
    ] = "2GiB",
    residency: Annotated[
        str, typer.Option(help="heap, mapped, streamed or unpacked; by default the first that fits the board.")
    ] = "",
    segments: Annotated[int | None, typer.Option(help="Cut into exactly so many, by default the best number.")] = None,
    max_segment: Annotated[str, typer.Option(help="Most weight bytes of a segment, like 200MiB.")] = "",
    cut_at: Annotated[
        list[str] | None, typer.Option(help="Cut behind the node that makes this value; can be given several times.")
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="How images become its input and outputs answers: a name or a .toml file.")
    ] = "",
    dump_after: Annotated[
        str, typer.Option(help="Write the graph after this pass to NAME.NN-PASS.onnx, weights referred to.")
    ] = "",
    dump_to: Annotated[Path | None, typer.Option(help="Folder for that; by default the bundle's.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Compile MODEL for a board.

    Examples:

      tightfit-compile rec.onnx --target raspberry-pi-5-4gb --shape x=1,3,48,320..1600 -o rec.tfb

      tightfit-compile rec.onnx --target raspberry-pi-5-4gb --scheme int8-static --calib lines/ -o rec.tfb

      tightfit-compile llm.onnx --target raspberry-pi-5-4gb --scheme int4 --calib prompts.npz -o llm.tfb

      tightfit-compile llm.onnx --target raspberry-pi-5-4gb --tokenizer tokenizer.json \
        --shape input_ids=1,1..16 --shape 'past_key_values.*=1,3,0..512,64' -o llm.tfb

      tightfit-compile 12gb.onnx --target raspberry-pi-5-4gb --scheme int4 --host-memory 1GiB -o 12gb.tfb

    Interrupted at any moment, the same command goes on where it was and ends with the same bytes.
    """
    # Imported here so that --help and inspect answer at once.
    from compile.options import Options  # noqa: PLC0415
    from compile.pipeline import compile_model  # noqa: PLC0415
    from compile.progress import JsonProgress, TerminalProgress  # noqa: PLC0415
    from compile.report import print_report  # noqa: PLC0415
    from compile.shapes import parse_shape  # noqa: PLC0415
    from compile.states import parse_state  # noqa: PLC0415
    from compile.text import read_tokenizer  # noqa: PLC0415
    from compile.windows import parse_split  # noqa: PLC0415

    options = Options(
        scheme=scheme,
        block=block,
        symmetric=symmetric,
        shapes=tuple(parse_shape(text) for text in shape or ()),
        batch_axis=batch_axis,
        pad=pad,
        states=tuple(map(parse_state, state or ())),
        tokenizer=read_tokenizer(tokenizer) if tokenizer else None,
        split=parse_split(split) if split else None,
        calib=calib,
        calibrate_with=calibrate_with,
        random=random,
        samples=samples,
        assets=tuple(asset or ()),
        name=name,
        slots=_slots(slots),
        max_error=max_error,
        overwrite=overwrite,
        host_memory=parse_size(host_memory),
        residency=_residency(residency),
        segments=segments,
        max_segment=parse_size(max_segment) if max_segment else None,
        cut_at=tuple(cut_at or ()),
        dump_after=dump_after,
        dump_to=dump_to,
        recipe=load_recipe(recipe) if recipe else None,
    )
    board = load_board(target)
    with JsonProgress() if json_output else TerminalProgress() as progress:
        manifest = compile_model(model, board, out, options, progress)
    if json_output:
        typer.echo((out / "report.json").read_text(), nl=False)
        return
    console = Console()
    print_report(manifest, console)
    console.print(f"[bold green]wrote[/] {escape(str(out))} ({human(sum(entry.nbytes for entry in manifest.files))})")


def _slots(text: str) -> int | None:
    if text == "auto":
        return None
    if not re.fullmatch("[0-9]{1,3}", text) or not 1 <= int(text) <= 256:
        raise TightfitError(f"--slots {text} is neither auto nor a number from 1 to 256", "leave it out for auto")
    return int(text)


def _residency(text: str) -> Residency | None:
    names = [residency.value for residency in Residency]
    if text and text not in names:
        raise TightfitError(f"unknown residency {text!r}", did_you_mean(text, names))
    return Residency(text) if text else None


@app.command("inspect")
def inspect_command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to look into.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole manifest as JSON.")] = False,
    verify: Annotated[bool, typer.Option(help="Read every file and compare its SHA-256.")] = True,
    plan: Annotated[bool, typer.Option("--plan", help="Draw the memory plan: phases, turns, activations.")] = False,
) -> None:
    """Show what a bundle promises, and check that its files are whole.

    The same with a picture of the plan, to be opened in a browser, is the bundle's report.html.

    Examples:

      tightfit-compile inspect rec.tfb

      tightfit-compile inspect rec.tfb --plan
    """
    from compile.report import print_plan, print_report  # noqa: PLC0415

    manifest = read_manifest(bundle)
    if verify:
        verify_files(bundle, manifest)
    if json_output:
        typer.echo(msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1).decode())
    elif plan:
        print_plan(manifest, Console())
    else:
        print_report(manifest, Console())


@app.command("prove")
def prove_command(
    bundle: Annotated[Path, typer.Argument(help="Bundle to run.")],
    limit: Annotated[str, typer.Option(help="Hard limit, like 3.4GiB; by default the budget of its board.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often every slot is filled at the same time.")] = 4,
    timeout_s: Annotated[float, typer.Option(min=1, help="For loading, and for one request.")] = 3600.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the proof as JSON, nothing else.")] = False,
) -> None:
    """Serve BUNDLE under a hard memory limit and compare its peak with its plan.

    The real agent is started and every slot is filled at once with requests of the largest shape. Needs the agent
    (pip install 'tightfit[agent,cpu]'). Exit code 0: it fits; 1: it does not; 2: it could not be tried.

    Examples:

      tightfit-compile prove rec.tfb

      tightfit-compile prove llm.tfb --limit 900MiB --json
    """
    from compile.progress import JsonProgress, TerminalProgress  # noqa: PLC0415
    from compile.prove import Verdict, prove  # noqa: PLC0415
    from compile.prove_report import print_proof, proof_json  # noqa: PLC0415

    with JsonProgress() if json_output else TerminalProgress() as progress:
        proof = prove(bundle, parse_size(limit) if limit else None, rounds, timeout_s, progress)
    if json_output:
        typer.echo(proof_json(proof))
    else:
        print_proof(proof, Console())
    if proof.verdict is not Verdict.FITS:
        raise typer.Exit(1)


def main() -> None:
    """Entry point: one clear line and exit code 2 for whatever a person can cause."""
    # A graph is hundreds of thousands of objects that stay: looking through them again and again, after every 700 new
    # ones, took a seventh of the time.
    gc.set_threshold(50_000, 20, 100)
    arguments = sys.argv[1:]
    # `tightfit-compile MODEL.onnx ...` is the main job, so it needs no verb.
    if not arguments:
        arguments = ["--help"]
    if arguments[0] not in ("compile", "inspect", "prove", "--help", "-h"):
        arguments = ["compile", *arguments]
    try:
        # Not standalone: typer would print usage errors as a box and end an interrupt without a word.
        code = app(args=arguments, prog_name=PROGRAM, standalone_mode=False)
    except TightfitError as error:
        fail(str(error))
    except _UsageError as error:
        fail(f"{error.format_message().rstrip('.')} (see {PROGRAM} {arguments[0]} --help)")
    except MemoryError as error:
        fail(f"this machine has not enough memory: {error}")
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed (pip install 'tightfit[compile,cpu]')")
    except OSError as error:
        fail(f"{error.filename or 'file system'}: {error.strerror or error}")
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        again = "; the same command goes on where it was" if arguments[0] == "compile" else ""
        sys.stderr.write(f"{PROGRAM}: interrupted{again}\n")
    sys.exit(code)


def fail(message: str) -> None:
    """Print one line and exit with 2."""
    sys.stderr.write(f"{PROGRAM}: error: {' '.join(message.split())}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
