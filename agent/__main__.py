"""The command line of the board's half."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer

    from agent import app as agent_app
except ModuleNotFoundError as error:
    sys.stderr.write(f"tightfit-agent: error: {error.name} is not installed (pip install 'tightfit[agent,cpu]')\n")
    sys.exit(2)

from agent.config import Memory, load_config
from agent.models import Model, machine_budget, open_model
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
    allow_insecure_network: Annotated[
        bool | None,
        typer.Option("--allow-insecure-network", help="Listen beyond this machine without TLS and authentication."),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error [info].")] = None,
) -> None:
    """Verify a bundle, load it and answer requests until SIGTERM."""
    settings = load_config(
        config,
        {
            "": {"bundle": str(bundle) if bundle else None},
            "http": {"host": host, "port": port, "allow_insecure_network": allow_insecure_network or None},
            "engine": {"threads": threads},
            "log": {"level": log_level},
        },
    )
    agent_app.serve(settings, _say)


@cli.command(epilog="Example: tightfit-agent check OUT.tfb")
def check(
    bundle: Annotated[Path, typer.Argument(help="The bundle (a folder).")],
    os_reserve_mib: Annotated[
        int, typer.Option(min=0, help="Memory that stays for the rest of the system.")
    ] = Memory().os_reserve_mib,
) -> None:
    """Verify a bundle as serve would: every file's digest, and that its plan fits this machine."""
    budget = machine_budget(os_reserve_mib)
    _say(_summary(open_model(bundle, budget), budget))


def _summary(model: Model, budget: int) -> str:
    plan = model.manifest.plan
    phases = ", ".join(f"{phase.name} {human(phase.total_bytes)}" for phase in plan.phases)
    return (
        f"{model.name} version {model.version} is whole and fits: {phases} of {human(budget)} on this machine, "
        f"{plan.slots} slots, compiled for {model.manifest.target} ({model.manifest.runtime})"
    )


def main() -> None:
    """Entry point: what a person can cause is one line and exit code 2."""
    try:
        cli()
    except TightfitError as error:
        sys.stderr.write(f"tightfit-agent: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
