"""The model as Triton's Python backend runs it: onnxruntime on one thread, a batch as one run.

Copied into a temporary model repository as `1/model.py`; Triton imports it, nothing here does. The parameter `onnx` of
config.pbtxt is the model's path; its input is `x`, its output `y`, with the batch as axis 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]


class TritonPythonModel:
    """The names are Triton's."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the ONNX file, and run it once."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = json.loads(args["model_config"])["parameters"]["onnx"]["string_value"]
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        shape = [dim if isinstance(dim, int) else 1 for dim in self._session.get_inputs()[0].shape]
        self._session.run(None, {"x": np.zeros(shape, np.float32)})

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, all from one run."""
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        batch = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        (output,) = self._session.run(None, {"x": batch})
        ends = np.cumsum([len(each) for each in inputs])[:-1]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", part)]) for part in np.split(output, ends)]
