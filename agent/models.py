"""Bundles as the gateway sees them: verified, judged against this machine, never loaded here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.certificate import check_certificate, check_weights
from agent.engine.channel import Layout
from agent.memory import mem_total_bytes
from agent.runtimes import backend_module
from targets.board import MIB
from targets.budget import PHASES, budget_of_machine, check_plan
from targets.bundle import Manifest, Residency, read_manifest, safe_path, verify_files, version_of
from targets.errors import BudgetError, BundleError
from targets.recipe import answer_contract, asset_of, check_input, check_outputs, read_labels
from targets.tensor import Contract, TensorSpec, human


@dataclass(frozen=True)
class Model:
    """A bundle that this machine can serve.

    `residencies` has one entry a segment: the plan's, or what a person chose. `finalised` is where those segments
    are that need laying out; None while nobody has looked, or when no segment does.
    """

    folder: Path
    manifest: Manifest
    digest: str
    layout: Layout
    residencies: tuple[Residency, ...]
    finalised: Path | None = None

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def version(self) -> str:
        """Short form of the digest (`Manifest.version`), kept: the manifest may be long."""
        return version_of(self.digest)

    @property
    def to_lay_out(self) -> tuple[int, ...]:
        """Segments that are served from laid-out files, by position."""
        return tuple(step for step, residency in enumerate(self.residencies) if residency.needs_finalise)

    @property
    def planned(self) -> bool:
        """Whether the weights are where the bundle's plan has them."""
        return self.residencies == tuple(segment.residency for segment in self.manifest.segments)

    @property
    def contract(self) -> Contract:
        return self.manifest.contract


def machine_budget(os_reserve_mib: int) -> int:
    """M of the machine the agent stands on, in bytes."""
    return budget_of_machine(mem_total_bytes(), os_reserve_mib * MIB)


def open_model(folder: Path, budget: int, residency: Residency | None = None) -> Model:
    """Judge the bundle: manifest, runtime, plan against its board and this machine, then every byte of every file, and
    what the plan counts for weights.

    `residency` is for all segments, whatever the plan says; the plan is judged as it stands all the same. Raises
    BundleError or BudgetError. The cheap checks come first, the digests last.
    """
    folder = folder.resolve()
    manifest = read_manifest(folder)
    backend_module(manifest.runtime)
    _check_servable(manifest)
    _check_memory(manifest, budget)
    verify_files(folder, manifest)
    check_weights(folder, manifest)
    labels_of(folder, manifest)
    residencies = tuple(residency or segment.residency for segment in manifest.segments)
    return Model(folder, manifest, manifest.digest, Layout.of(manifest.contract, manifest.plan.slots), residencies)


def check_beside(model: Model, others: Sequence[Model], budget: int, kept: int = 0) -> None:
    """Whether the model can be loaded, and run, while the others run: by the plans of all. Raises BudgetError.

    Each has an engine process of its own, so each plan's fixed cost counts. `kept` bytes are for answers that are kept.
    """
    needed = max(model.manifest.plan.phase(name).total_bytes for name in PHASES)
    running = [other.manifest.plan.phase("run").total_bytes for other in others]
    if needed + sum(running) + kept <= budget:
        return
    listed = " + ".join(f"{human(size)} of {other.name}" for size, other in zip(running, others, strict=True))
    raise BudgetError(
        f"no room for {model.name}: it needs {human(needed)} beside {listed or 'nothing'}, "
        f"but the budget of this machine is {human(budget)}{f', of which {human(kept)} keep answers' if kept else ''}",
        "serve fewer models, or compile them for less (--scheme int4, smaller shapes, fewer slots)",
    )


def is_like(model: Model, other: Model) -> bool:
    """Whether what can be asked of the one can be asked of the other, and is answered in the same form."""

    def form(contract: Contract) -> tuple[object, ...]:
        inputs = [(spec.name, spec.dtype, spec.layout, _ranges(spec, contract)) for spec in contract.inputs]
        return inputs, [(spec.name, spec.dtype, len(spec.shape)) for spec in contract.outputs]

    recipes = (model.manifest.recipe, other.manifest.recipe)
    answers = [recipe and form(answer_contract(recipe)) for recipe in recipes]
    return form(model.contract.whole) == form(other.contract.whole) and answers[0] == answers[1]


def _ranges(spec: TensorSpec, contract: Contract) -> list[tuple[int, int]]:
    return [
        (dim, dim) if isinstance(dim, int) else (contract.dims[dim].min, contract.dims[dim].max) for dim in spec.shape
    ]


def _check_servable(manifest: Manifest) -> None:
    for spec in (*manifest.contract.inputs, *manifest.contract.outputs):
        if spec.dtype.oip is None or spec.dtype.numpy is None:
            raise BundleError(
                f"tensor {spec.describe()} has a type that this version cannot take or give",
                "compile the model with float32 or integer inputs and outputs",
            )
    if manifest.plan.slots < 1:
        raise BundleError("the plan has no slots", "compile the bundle again with at least one")
    _check_segments(manifest)
    if manifest.recipe:
        check_input(manifest.recipe, manifest.contract)
        check_outputs(manifest.recipe, manifest.contract)
        if asset_of(manifest.recipe) not in ("", *manifest.assets):
            raise BundleError(f"the recipe reads {asset_of(manifest.recipe)}, which the bundle does not have")


def labels_of(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Names of the classes that the recipe's answers have; none without a recipe. The files are verified before."""
    if manifest.recipe is None:
        return ()
    return read_labels(manifest.recipe, manifest.contract, lambda path: safe_path(folder, path).read_bytes())


def _check_segments(manifest: Manifest) -> None:
    """Every segment's inputs come from the contract or from a segment before it, and every output is made."""
    known = {spec.name for spec in manifest.contract.inputs}
    for segment in manifest.segments:
        missing = [name for name in segment.inputs if name not in known]
        if missing:
            raise BundleError(f"segment {segment.file} needs {missing[0]!r}, which nothing before it makes")
        known.update(segment.outputs)
    unmade = [spec.name for spec in manifest.contract.outputs if spec.name not in known]
    if unmade:
        raise BundleError(f"no segment makes output {unmade[0]!r}", "compile the bundle again")


def _check_memory(manifest: Manifest, budget: int) -> None:
    plan = manifest.plan
    check_plan(plan, plan.budget_bytes)
    check_certificate(manifest)
    try:
        check_plan(plan, budget)
    except BudgetError as error:
        raise BudgetError(
            f"board too small for {manifest.name} (compiled for {manifest.target}): {error.message}", error.hint
        ) from None
