"""The model as KServe's ModelServer runs it: `python kserve_model.py NAME ONNX HTTP_PORT`, onnxruntime on one thread.

Runs in an environment of KServe's own. The input is `x`, the output `y`; the answer is binary where that was asked for.
"""

from __future__ import annotations

import sys
from typing import Any

import onnxruntime
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer  # type: ignore[import-not-found]
from kserve.utils.utils import generate_uuid  # type: ignore[import-not-found]


class OnnxModel(Model):  # type: ignore[misc]
    """The names are KServe's."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.ready = True

    async def predict(self, payload: InferRequest, *_: Any, **__: Any) -> InferResponse:
        """One request, one run."""
        (y,) = self._session.run(None, {"x": payload.inputs[0].as_numpy()})
        output = InferOutput("y", list(y.shape), "FP32")
        output.set_data_from_numpy(y, binary_data=payload.use_binary_outputs)
        # Its JSON needs an id, also where the request had none.
        answered = payload.id or generate_uuid()
        return InferResponse(answered, self.name, [output], use_binary_outputs=payload.use_binary_outputs)


if __name__ == "__main__":
    name, path, port = sys.argv[1:]
    # Its own command line is not for this program's arguments, which it would otherwise read when it is started.
    server = ModelServer(http_port=int(port), workers=1, enable_grpc=False, enable_latency_logging=False)
    server.start([OnnxModel(name, path)])
