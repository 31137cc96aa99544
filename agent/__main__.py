"""The command line of the board's half."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec

try:
    import typer

    from agent import app as agent_app
except ModuleNotFoundError as error:
    sys.stderr.write(f"tightfit-agent: error: {error.name} is not installed (pip install 'tightfit[agent,cpu]')\n")
    sys.exit(2)

from agent import finalise as finalising
from agent.access import tokens
from agent.config import Config, EngineOptions, Memory, load_config
from agent.errors import ConfigError
from agent.generation.tokenizer import load_text
from agent.images import load_images
from agent.load.command import EXAMPLES, bench
from agent.models import Model, machine_budget, open_model
from agent.mqtt import check as broker_check
from targets.bundle import NAME, Residency
from targets.errors import TightfitError
from targets.tensor import human

cli = typer.Typer(
    name="tightfit-agent",
    help="Serve a bundle over HTTP/1.1 (Open Inference Protocol v2).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


# As in the unit.
_CONFIG = Path("/etc/tightfit/agent.toml")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@cli.command(
    epilog="Examples: tightfit-agent serve --bundle OUT.tfb --port 8080"
    " | tightfit-agent serve --config /etc/tightfit/agent.toml"
)
def serve(
    *,
    bundle: Annotated[Path | None, typer.Option(help="The bundle (a folder) to serve.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML configuration; flags win over it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for a free one [8080].")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for one operator, 0 for one per core [0].")] = None,
    residency: Annotated[
        Residency | None, typer.Option(help="Where every segment's weights are, whatever the bundle's plan says.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Where finalise put its files [see finalise --help].")] = None,
    finalise_on_start: Annotated[
        bool | None, typer.Option("--finalise", help="Finalise the bundle first if that was not done.")
    ] = None,
    allow_insecure_network: Annotated[
        bool | None,
        typer.Option(
            "--insecure",
            "--allow-insecure-network",
            help="Listen beyond this machine without TLS and authentication: whoever can connect may do all.",
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error [info].")] = None,
) -> None:
    """Verify a bundle, load it and answer requests until SIGTERM."""
    flags: dict[str, dict[str, Any]] = {
        "": {"bundle": str(bundle) if bundle else None},
        "http": {"host": host, "port": port, "allow_insecure_network": allow_insecure_network or None},
        "engine": {
            "threads": threads,
            "residency": residency.value if residency else None,
            "cache": str(cache) if cache else None,
            "finalise_on_start": finalise_on_start or None,
        },
        "log": {"level": log_level},
    }

    def read() -> Config:
        return load_config(config, flags)

    agent_app.serve(read(), read, _say)


@cli.command(
    epilog="Default for --cache: $TIGHTFIT_STATE/finalised if TIGHTFIT_STATE is set, else /var/lib/tightfit/finalised"
    " if /var/lib/tightfit can be written, else BUNDLE.finalised beside the bundle; serve looks in the same places."
    " What is made is good for this bundle, this version of the runtime and this CPU only."
    " Example: tightfit-agent finalise OUT.tfb"
)
def finalise(
    bundle: Annotated[Path, typer.Argument(help="The bundle (a folder).")],
    *,
    cache: Annotated[Path | None, typer.Option(help="Folder to write to, about twice the weights.")] = None,
    residency: Annotated[
        Residency | None, typer.Option(help="As given to serve, where that is not as the bundle's plan has it.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads, 0 for one per core.")] = 0,
    os_reserve_mib: Annotated[
        int, typer.Option(min=0, help="Memory that stays for the rest of the system.")
    ] = Memory().os_reserve_mib,
    prune: Annotated[
        bool, typer.Option("--prune", help="First delete what other runtimes or CPUs made of this bundle there.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Say what was done as JSON.")] = False,
) -> None:
    """Lay out the weights of mapped and streamed segments for this board, once, one segment at a time."""
    model = open_model(bundle, machine_budget(os_reserve_mib), residency)
    freed = finalising.prune(model, cache) if prune else 0
    report = None
    if model.to_lay_out:
        intra_op_threads = EngineOptions(threads=threads).intra_op_threads
        report = finalising.build(model, cache, intra_op_threads, _note)
    _say(_finalised_json(report, freed) if json else _finalised_text(model, report, freed))


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _finalised_text(model: Model, report: finalising.Report | None, freed: int) -> str:
    head = f"{model.name} version {model.version}"
    pruned = f"; {human(freed)} of what others made were deleted" if freed else ""
    if report is None:
        return f"{head}: nothing to build, no segment is mapped or streamed{pruned}"
    count, total = len(report.finalised.segments), human(report.finalised.total_bytes)
    storage = f"{count} segment{'s' * (count != 1)} in {report.folder} take {total} of storage{pruned}"
    if not report.built:
        return f"{head} is finalised already, all files verified: {storage}"
    cost = f"{report.seconds:.1f} s, at most {human(report.peak_bytes)} of memory"
    return f"{head} is finalised ({len(report.built)} built now, {cost}): {storage}"


def _finalised_json(report: finalising.Report | None, freed: int) -> str:
    fields = {"state": "nothing to build", "built": [], "segments": [], "total_bytes": 0, "freed_bytes": freed}
    if report is not None:
        fields |= {
            "state": "built" if report.built else "present",
            "folder": str(report.folder),
            "built": report.built,
            "segments": report.finalised.segments,
            "total_bytes": report.finalised.total_bytes,
            "machine": report.finalised.machine,
            "seconds": round(report.seconds, 3),
            "peak_bytes": report.peak_bytes,
        }
    return msgspec.json.encode(fields).decode("utf-8")


@cli.command(epilog="Example: tightfit-agent check OUT.tfb")
def check(
    bundle: Annotated[Path, typer.Argument(help="The bundle (a folder).")],
    os_reserve_mib: Annotated[
        int, typer.Option(min=0, help="Memory that stays for the rest of the system.")
    ] = Memory().os_reserve_mib,
) -> None:
    """Verify a bundle as serve would: every file's digest, and that its plan fits this machine."""
    budget = machine_budget(os_reserve_mib)
    model = open_model(bundle, budget)
    load_images(model)
    load_text(model)
    _say(_summary(model, budget))


def _summary(model: Model, budget: int) -> str:
    plan = model.manifest.plan
    phases = ", ".join(f"{phase.name} {human(phase.total_bytes)}" for phase in plan.phases)
    return (
        f"{model.name} version {model.version} is whole and fits: {phases} of {human(budget)} on this machine, "
        f"{plan.slots} slots, compiled for {model.manifest.target} ({model.manifest.runtime})"
    )


@cli.command(epilog="Example: tightfit-agent token camera")
def token(
    name: Annotated[str, typer.Argument(help="The caller whose it is: a name under [[callers]].")],
) -> None:
    """Make a bearer token: it is shown once, and the agent's file of tokens keeps its digest alone."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be a caller's name", "letters, digits, '.', '_' and '-', at most 100")
    made = tokens.make()
    _say(
        f"token, for {name} alone, shown this once:\n{made}\nline for the file of tokens:\n{tokens.line_of(name, made)}"
    )


cli.command(epilog=EXAMPLES)(bench)

mqtt = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
cli.add_typer(mqtt, name="mqtt", help="Telemetry to a broker (docs/mqtt.md).")


@mqtt.callback()
def _mqtt() -> None:
    """Telemetry to a broker."""


@mqtt.command(
    "check",
    epilog="Exit code: 0 where every broker can be used, 1 where one cannot, 2 where the configuration is not valid."
    " Example: tightfit-agent mqtt check --config /etc/tightfit/agent.toml",
)
def mqtt_check(
    *,
    config: Annotated[Path, typer.Option(help="TOML configuration, of which [mqtt] is looked at.")] = _CONFIG,
    json: Annotated[bool, typer.Option("--json", help="Say what was found as JSON.")] = False,
) -> None:
    """Say what is wrong with a broker: its name, address, certificate, login, limits and access lists, step by step."""
    reports = broker_check.check(load_config(config, {}).mqtt)
    _say(broker_check.as_json(reports) if json else broker_check.as_text(reports))
    if not all(each.is_well for each in reports):
        raise typer.Exit(1)


def main() -> None:
    """Entry point: what a person can cause is one line and exit code 2."""
    try:
        cli()
    except TightfitError as error:
        sys.stderr.write(f"tightfit-agent: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
