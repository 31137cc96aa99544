"""The model as MLServer runs it: a custom runtime over onnxruntime on one thread, in MLServer's own process.

Runs in an environment of MLServer's own, which finds it by `implementation` in model-settings.json; `parameters.uri`
there is the ONNX file. The input is `x`, the output `y`.
"""

from __future__ import annotations

import onnxruntime
from mlserver import MLModel  # type: ignore[import-not-found]
from mlserver.codecs import NumpyCodec  # type: ignore[import-not-found]
from mlserver.types import InferenceRequest, InferenceResponse  # type: ignore[import-not-found]


class OnnxModel(MLModel):  # type: ignore[misc]
    """The names are MLServer's."""

    async def load(self) -> bool:
        """Open the ONNX file."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = self.settings.parameters.uri
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """One request, one run."""
        (y,) = self._session.run(None, {"x": NumpyCodec.decode_input(payload.inputs[0])})
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=[NumpyCodec.encode_output("y", y)])
