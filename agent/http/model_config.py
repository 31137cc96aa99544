"""A model's configuration in the words of Triton's model_config.proto: what clients and perf_analyzer read of it. Pure.

Source: Triton `extension_model_configuration.md`. What a client cannot act on (instances, optimization, files) is left
out, as proto3 JSON leaves out what has its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.served import Served
from targets.recipe import Classify, asset_of, output_names
from targets.tensor import Contract, DType, TensorSpec


def config_of(served: Served, versions: int) -> dict[str, Any]:
    """Of a version that is active, one of so many. A dimension that a request chooses is -1.

    Where requests can be put together axis 0 is Triton's batch: it is in `max_batch_size`, and no part of `dims`.
    """
    model, contract = served.model, served.model.contract
    whole, batched = contract.whole, contract.batch is not None
    config = _config(served.name, f"{model.manifest.runtime}_onnx", whole, batched, _label_files(served))
    config |= {"backend": model.manifest.runtime, "version_policy": {"latest": {"num_versions": versions}}}
    if contract.batch is not None:
        config["max_batch_size"] = contract.dims[contract.batch].max
    if contract.batch_rows > 1:
        config["dynamic_batching"] = {"priority_levels": 255, "default_priority_level": served.options.priority}
    if served.cached:
        config["response_cache"] = {"enable": True}
    return config


def ensemble_config(name: str, contract: Contract, members: Mapping[str, Contract]) -> dict[str, Any]:
    """Of an ensemble that is `contract` as a whole; an output goes by its member's name and its own."""
    steps = [
        {
            "model_name": member,
            "model_version": -1,
            "input_map": {spec.name: spec.name for spec in each.inputs},
            "output_map": {spec.name: f"{member}.{spec.name}" for spec in each.outputs},
        }
        for member, each in members.items()
    ]
    config = _config(name, "ensemble", contract, False, {})
    return {**config, "version_policy": {"latest": {"num_versions": 1}}, "ensemble_scheduling": {"step": steps}}


def _config(
    name: str, platform: str, contract: Contract, batched: bool, label_files: Mapping[str, str]
) -> dict[str, Any]:
    inputs = [_tensor(spec, batched) for spec in contract.inputs]
    outputs = [_tensor(spec, batched) for spec in contract.outputs]
    for tensor in outputs:
        if tensor["name"] in label_files:
            tensor["label_filename"] = label_files[tensor["name"]]
    return {"name": name, "platform": platform, "max_batch_size": 0, "input": inputs, "output": outputs}


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    dims: Sequence[int] = [dim if isinstance(dim, int) else -1 for dim in spec.shape[1 if batched else 0 :]]
    data_type = "TYPE_STRING" if spec.dtype is DType.STRING else f"TYPE_{spec.dtype.oip}"
    tensor: dict[str, Any] = {"name": spec.name, "data_type": data_type, "dims": dims}
    if not dims:
        # Triton has no scalars: one element, which the model sees as none of its dimensions.
        tensor |= {"dims": [1], "reshape": {"shape": []}}
    return tensor


def _label_files(served: Served) -> dict[str, str]:
    """The bundle's file with names of classes, by the output that they are of."""
    recipe = served.model.manifest.recipe
    if recipe is None or not isinstance(recipe.post, Classify) or not recipe.post.labels:
        return {}
    return {output_names(recipe.post, served.model.contract)[0]: asset_of(recipe)}
