"""The model as LitServe runs it: `python litserve_api.py NAME ONNX HTTP_PORT`, onnxruntime on one thread.

Runs in an environment of LitServe's own. It has no protocol of inference; this API reads and writes the JSON of the
Open Inference Protocol, for a model with one FP32 input `x` and one output `y`.
"""

# LitServe reads the annotation of decode_request, which must be no string.
import sys
from typing import Any

import litserve  # type: ignore[import-not-found]
import numpy as np
import onnxruntime


class OnnxApi(litserve.LitAPI):  # type: ignore[misc]
    """The names are LitServe's. Made in the process that serves, set up in the one that runs the model."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(api_path=f"/v2/models/{name}/infer")
        self._name, self._path = name, path

    def setup(self, device: str) -> None:  # noqa: ARG002 - its interface
        """Open the ONNX file."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(self._path, options, providers=["CPUExecutionProvider"])

    def decode_request(self, request: dict[str, Any]) -> np.ndarray[Any, Any]:
        """The one input."""
        x = request["inputs"][0]
        return np.array(x["data"], np.float32).reshape(tuple(map(int, x["shape"])))

    def predict(self, x: np.ndarray[Any, Any]) -> Any:
        """One request, one run."""
        return self._session.run(None, {"x": x})[0]

    def encode_response(self, y: np.ndarray[Any, Any]) -> dict[str, Any]:
        """The answer as the protocol has it."""
        output = {"name": "y", "datatype": "FP32", "shape": list(y.shape), "data": y.ravel().tolist()}
        return {"model_name": self._name, "outputs": [output]}


if __name__ == "__main__":
    name, path, port = sys.argv[1:]
    server = litserve.LitServer(OnnxApi(name, path), accelerator="cpu", workers_per_device=1, timeout=60)
    server.run("127.0.0.1", int(port), num_api_servers=1, log_level="warning", generate_client_file=False)
