"""Unchanged tritonclient against a real agent: what works there must work here."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from targets.tensor import DType
from tests.support import bundles
from tests.support.agents import Agent, serving
from tests.support.bundles import ONNX_TYPES

with warnings.catch_warnings():
    # gevent's monkey patches and its use of pkg_resources warn while they are imported.
    warnings.simplefilter("ignore")
    http = importlib.import_module("tritonclient.http")
    aio = importlib.import_module("tritonclient.http.aio")
    InferenceServerException = importlib.import_module("tritonclient.utils").InferenceServerException

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(7)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("every")
    with serving(bundles.every_type(folder / "every.tfb"), folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture(scope="module")
def add(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("add")
    with serving(bundles.add(folder / "add.tfb"), folder / "log") as agent:
        yield agent
        assert "Traceback" not in agent.log


@pytest.fixture
def client(add: Agent) -> Iterator[Any]:
    with http.InferenceServerClient(add.address, concurrency=4) as client:
        yield client


def value_of(dtype: DType) -> Array:
    if dtype is DType.STRING:
        return np.array([[b"a", b"", "\u00e9\U0001f697".encode()], [b"\0", b"x" * 30, b'"\\']], dtype=object)
    if dtype is DType.BOOL:
        return np.array([[True, False, True], [False, True, False]])
    if dtype.value.startswith("float"):
        return RANDOM.standard_normal((2, 3)).astype(dtype.numpy)
    info = np.iinfo(np.dtype(dtype.numpy))
    return np.array([[info.min, info.max, 0], [1, 2, 3]], dtype=dtype.numpy)


def tensor(name: str, value: Array, oip: str, binary: bool, module: Any = http) -> Any:
    given = module.InferInput(name, list(value.shape), oip)
    given.set_data_from_numpy(value, binary_data=binary)
    return given


def pair(value: Array, binary: bool, module: Any = http) -> list[Any]:
    return [tensor(name, value, "FP32", binary, module) for name in "ab"]


def rows(count: int = 1) -> Array:
    return RANDOM.standard_normal((count, 8)).astype(np.float32)


@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("binary_in", [True, False])
def test_every_type_in_every_form(every: Agent, binary_in: bool, binary_out: bool) -> None:
    values = {dtype: value_of(dtype) for dtype in ONNX_TYPES}
    # The protocol has no JSON form of FP16.
    inputs = [tensor(f"in_{d.oip}", value, d.oip, binary_in or d is DType.FLOAT16) for d, value in values.items()]
    outputs = [http.InferRequestedOutput(f"out_{d.oip}", binary_data=binary_out or d is DType.FLOAT16) for d in values]
    with http.InferenceServerClient(every.address) as client:
        result = client.infer("every", inputs, outputs=outputs)
    for dtype, value in values.items():
        answer = result.as_numpy(f"out_{dtype.oip}")
        if dtype is DType.STRING and not binary_out:
            answer = np.array([text.encode() for text in answer.ravel()], dtype=object).reshape(answer.shape)
        assert answer.dtype == value.dtype
        assert answer.tolist() == value.tolist(), dtype


def test_fp16_as_json_is_refused_both_ways(every: Agent) -> None:
    values = {dtype: value_of(dtype) for dtype in ONNX_TYPES}
    inputs = [tensor(f"in_{d.oip}", value, d.oip, True) for d, value in values.items()]
    outputs = [http.InferRequestedOutput("out_FP16", binary_data=False)]
    with (
        http.InferenceServerClient(every.address) as client,
        pytest.raises(InferenceServerException, match="FP16, which has no JSON form"),
    ):
        client.infer("every", inputs, outputs=outputs)


@pytest.mark.parametrize("response", [None, "gzip", "deflate"])
@pytest.mark.parametrize("request_", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compression(client: Any, request_: str | None, response: str | None, binary: bool) -> None:
    value = rows(4)
    outputs = [http.InferRequestedOutput("total", binary_data=binary)]
    result = client.infer(
        "add", pair(value, binary), outputs=outputs,
        request_compression_algorithm=request_, response_compression_algorithm=response,
    )  # fmt: skip
    np.testing.assert_array_equal(result.as_numpy("total"), value + value)


def test_large_binary_responses_are_compressed_when_a_single_coding_is_named(tmp_path: Path) -> None:
    with serving(bundles.identity(tmp_path / "x.tfb", DType.FLOAT32, (64, 1024)), tmp_path / "log") as agent:
        value = np.zeros((64, 1024), np.float32)
        with http.InferenceServerClient(agent.address) as client:
            result = client.infer(
                "x", [tensor("x", value, "FP32", True)], response_compression_algorithm="gzip"
            )  # fmt: skip
        np.testing.assert_array_equal(result.as_numpy("y"), value)
        body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[64,1024],"data":[' + b"0," * 65535 + b"0]}]}"
        _, data, headers = agent.post(body, {"Accept-Encoding": "gzip"})
        assert headers["Content-Encoding"] == "gzip"
        assert len(data) < 10_000


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("binary", [True, False])
def test_several_inputs_and_dynamic_dimensions(client: Any, batch: int, binary: bool) -> None:
    a, b = rows(batch), rows(batch)
    inputs = [tensor("b", b, "FP32", binary), tensor("a", a, "FP32", not binary)]
    result = client.infer("add", inputs, request_id="7")
    np.testing.assert_array_equal(result.as_numpy("total"), a + b)
    np.testing.assert_array_equal(result.as_numpy("scaled"), (a + b) * np.arange(8, dtype=np.float32))
    assert result.get_response()["id"] == "7"
    assert result.get_response()["model_name"] == "add"


def test_parameters_that_clients_send(client: Any) -> None:
    value = rows()
    metadata = client.get_model_metadata("add")
    result = client.infer(
        "add", pair(value, True), model_version=metadata["versions"][0], priority=1, timeout=60_000_000,
        sequence_id=3, sequence_start=True, sequence_end=True, parameters={"note": "x"}, headers={"X-Trace": "1"},
    )  # fmt: skip
    np.testing.assert_array_equal(result.as_numpy("total"), value + value)
    assert result.get_response()["model_version"] == metadata["versions"][0]


def test_async_infer(client: Any) -> None:
    values = [rows() for _ in range(16)]
    pending = [client.async_infer("add", pair(value, True)) for value in values]
    for value, answer in zip(values, pending, strict=True):
        np.testing.assert_array_equal(answer.get_result().as_numpy("total"), value + value)


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add")
    assert not client.is_model_ready("none")
    assert client.get_server_metadata()["name"] == "tightfit-agent"
    metadata = client.get_model_metadata("add")
    assert metadata["inputs"] == [{"name": n, "datatype": "FP32", "shape": [-1, 8]} for n in "ab"]
    assert [output["name"] for output in metadata["outputs"]] == ["total", "scaled"]
    assert client.is_model_ready("add", metadata["versions"][0])
    assert not client.is_model_ready("add", "2")


def test_errors_reach_the_client_as_text(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"unknown model 'none'.*available: add") as caught:
        client.infer("none", pair(rows(), True))
    assert caught.value.status() == "404"
    with pytest.raises(InferenceServerException, match=r"has size 9 on axis 1.*compiled for 8") as caught:
        client.infer("add", pair(np.zeros((1, 9), np.float32), True))
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="input 'b' is missing"):
        client.infer("add", pair(rows(), True)[:1])
    with pytest.raises(InferenceServerException, match=r"size 5 on axis 0.*compiled for 1..4"):
        client.infer("add", pair(rows(5), False))
    with pytest.raises(InferenceServerException, match="unknown output 'z'"):
        client.infer("add", pair(rows(), True), outputs=[http.InferRequestedOutput("z")])
    with pytest.raises(InferenceServerException, match="disagree on dimension 'batch'"):
        client.infer("add", [tensor("a", rows(1), "FP32", True), tensor("b", rows(2), "FP32", True)])


def test_a_raw_request_body(client: Any) -> None:
    value = rows()
    body, length = http.InferenceServerClient.generate_request_body(pair(value, True))
    assert length is not None
    answer = client._post("v2/models/add/infer", body, {"Inference-Header-Content-Length": length}, None)
    assert answer.status_code == 200


def test_aio(add: Agent) -> None:
    async def use() -> None:
        async with aio.InferenceServerClient(add.address) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("add"))["name"] == "add"
            for binary in (True, False):
                for coding in (None, "gzip", "deflate"):
                    value = rows(4)
                    result = await client.infer(
                        "add", pair(value, binary, aio),
                        outputs=[aio.InferRequestedOutput("total", binary_data=binary)],
                        request_compression_algorithm=coding, response_compression_algorithm=coding,
                    )  # fmt: skip
                    np.testing.assert_array_equal(result.as_numpy("total"), value + value)
            values = [rows() for _ in range(16)]
            answers = await asyncio.gather(*(client.infer("add", pair(value, True, aio)) for value in values))
            for value, answer in zip(values, answers, strict=True):
                np.testing.assert_array_equal(answer.as_numpy("total"), value + value)
            with pytest.raises(InferenceServerException, match="unknown model"):
                await client.infer("none", pair(rows(), True, aio))

    asyncio.run(use())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """Two models that may be loaded and unloaded on request."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "bundles").mkdir()
    bundles.identity(folder / "bundles" / "copy.tfb", DType.FLOAT32)
    config = folder / "agent.toml"
    config.write_text(f'[repository]\ncontrol = true\nfolders = ["{folder}/bundles"]\n', encoding="utf-8")
    with serving(bundles.picking(folder / "pick.tfb"), folder / "log", "--config", str(config)) as agent:
        yield agent
        assert "Traceback" not in agent.log


def picked(*wanted: Any, rows: int = 2, **parameters: Any) -> dict[str, Any]:
    """Arguments of an infer: `picked` counts from 1 to 8 times the rows."""
    x = tensor("x", np.ones((rows, 8), np.float32), "FP32", True)
    at = tensor("at", np.arange(rows), "INT64", False)
    return {"model_name": "pick", "inputs": [x, at], "outputs": list(wanted) or None, **parameters}


def total(result: Any) -> Any:
    return result.as_numpy("picked").sum()


# Of either client, in this order: what is asked, and whether the answer is right. Both take the same inputs.
CALLS: dict[str, tuple[Any, Any]] = {
    "live": (lambda c: c.is_server_live(), bool),
    "ready": (lambda c: c.is_server_ready(), bool),
    "model ready": (lambda c: c.is_model_ready("pick"), bool),
    "model not ready": (lambda c: c.is_model_ready("copy"), lambda ready: not ready),
    "server": (lambda c: c.get_server_metadata(), lambda found: "statistics" in found["extensions"]),
    "metadata": (lambda c: c.get_model_metadata("pick"), lambda found: found["platform"] == "onnxruntime_onnx"),
    "config": (lambda c: c.get_model_config("pick"), lambda found: found["max_batch_size"] == 8),
    "index": (lambda c: c.get_model_repository_index(), lambda found: len(found) == 2),
    "load": (lambda c: c.load_model("copy"), lambda done: done is None),
    "loaded": (lambda c: c.is_model_ready("copy"), bool),
    "unload": (lambda c: c.unload_model("copy", unload_dependents=True), lambda done: done is None),
    "infer": (lambda c: c.infer(**picked()), lambda result: total(result) == 136),
    "infer with an id": (
        lambda c: c.infer(**picked(request_id="a7")),
        lambda result: result.get_response()["id"] == "a7",
    ),
    "infer, some outputs, raw and JSON": (
        lambda c: c.infer(
            **picked(http.InferRequestedOutput("picked"), http.InferRequestedOutput("company", binary_data=False))
        ),
        lambda result: (
            result.as_numpy("company").tolist() == [2, 2]
            and result.as_numpy("picked")[1, 0] == 9
            and result.get_output("most") is None
        ),
    ),
    "infer, best classes": (
        lambda c: c.infer(**picked(http.InferRequestedOutput("picked", class_count=2))),
        lambda result: result.as_numpy("picked").tolist() == [[b"8.0:7", b"7.0:6"], [b"16.0:7", b"15.0:6"]],
    ),
    "infer, urgently": (
        lambda c: c.infer(**picked(priority=1, timeout=60_000_000, parameters={"mine": "x", "n": 7})),
        lambda result: total(result) == 136,
    ),
    "infer of a sequence": (
        lambda c: c.infer(**picked(sequence_id=3, sequence_start=True, sequence_end=True)),
        lambda result: total(result) == 136,
    ),
    "infer of a sequence with a name": (
        lambda c: c.infer(**picked(sequence_id="drive-7", sequence_start=True)),
        lambda result: total(result) == 136,
    ),
    "infer, compressed": (
        lambda c: c.infer(**picked(request_compression_algorithm="gzip", response_compression_algorithm="deflate")),
        lambda result: total(result) == 136,
    ),
    "infer with headers": (
        lambda c: c.infer(**picked(headers={"X-Request-Id": "7"}, query_params={"a": 1})),
        lambda result: total(result) == 136,
    ),
    "statistics": (
        lambda c: c.get_inference_statistics("pick"),
        lambda found: found["model_stats"][0]["inference_stats"]["success"]["count"] >= 8,
    ),
    "all statistics": (lambda c: c.get_inference_statistics(), lambda found: len(found["model_stats"]) == 1),
    "trace settings": (lambda c: c.get_trace_settings(), lambda found: found["trace_level"] == ["OFF"]),
    "a model's trace settings": (lambda c: c.get_trace_settings("pick"), lambda found: "trace_rate" in found),
    "trace settings again": (
        lambda c: c.update_trace_settings(settings={"trace_level": ["OFF"], "trace_rate": None}),
        lambda found: found["trace_level"] == ["OFF"],
    ),
    "log settings": (lambda c: c.get_log_settings(), lambda found: found["log_error"] is True),
    "log settings again": (
        lambda c: c.update_log_settings({"log_info": True}),
        lambda found: found["log_info"] is True,
    ),
    "shared memory": (lambda c: c.get_system_shared_memory_status(), lambda found: found == []),
    "CUDA shared memory": (lambda c: c.get_cuda_shared_memory_status(), lambda found: found == []),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "a region": (lambda c: c.register_system_shared_memory("r", "/r", 64), "shared memory is not supported"),
    "a CUDA region": (lambda c: c.register_cuda_shared_memory("r", b"r", 0, 64), "shared memory is not supported"),
    "forget regions": (lambda c: c.unregister_system_shared_memory(), "shared memory is not supported"),
    "forget a CUDA region": (lambda c: c.unregister_cuda_shared_memory("r"), "shared memory is not supported"),
    "a region's status": (lambda c: c.get_system_shared_memory_status("r"), "no shared memory region 'r'"),
    "trace": (lambda c: c.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}), "cannot be set"),
    "log": (lambda c: c.update_log_settings({"log_verbose_level": 1}), "cannot be set"),
    "a version": (lambda c: c.get_model_config("pick", "1"), "no version '1'"),
    "too many": (lambda c: c.infer(**picked(rows=9)), "size 9 on axis 0"),
    "classes of none": (
        lambda c: c.infer(**picked(http.InferRequestedOutput("most", class_count=5000))),
        "classification is 5000",
    ),
    "a priority": (
        lambda c: c.infer(**picked(priority=256)),
        "priority is 256",
    ),
}


def test_the_whole_surface(whole: Agent) -> None:
    with http.InferenceServerClient(whole.address) as client:
        for name, (ask, right) in CALLS.items():
            assert right(ask(client)), name
        for ask, words in REFUSED.values():
            with pytest.raises(InferenceServerException, match=words):
                ask(client)


def test_the_whole_surface_of_aio(whole: Agent) -> None:
    async def use() -> None:
        async with aio.InferenceServerClient(whole.address) as client:
            for name, (ask, right) in CALLS.items():
                assert right(await ask(client)), name
            for ask, words in REFUSED.values():
                with pytest.raises(InferenceServerException, match=words):
                    await ask(client)

    asyncio.run(use())


def test_the_model_repository(tmp_path: Path) -> None:
    folder = tmp_path / "bundles"
    folder.mkdir()
    bundles.identity(folder / "copy.tfb", DType.FLOAT32)
    config = tmp_path / "agent.toml"
    config.write_text(f'[repository]\ncontrol = true\nfolders = ["{folder}"]\n', encoding="utf-8")
    arguments = ("--config", str(config))
    with (
        serving(bundles.add(tmp_path / "add.tfb"), tmp_path / "log", *arguments) as agent,
        http.InferenceServerClient(agent.address) as client,
    ):

        def states() -> dict[str, str]:
            return {each["name"]: each["state"] for each in client.get_model_repository_index()}

        assert states() == {"add": "READY", "copy": "UNAVAILABLE"}
        client.load_model("copy")
        assert client.is_model_ready("copy")
        assert states() == {"add": "READY", "copy": "READY"}
        given = http.InferInput("x", [2, 3], "FP32")
        given.set_data_from_numpy(np.ones((2, 3), np.float32))
        result = client.infer("copy", [given], priority=1, timeout=60_000_000)
        np.testing.assert_array_equal(result.as_numpy("y"), np.ones((2, 3), np.float32))
        client.unload_model("copy")
        assert not client.is_model_ready("copy")
        with pytest.raises(InferenceServerException, match="model 'copy' is not loaded"):
            client.infer("copy", [given])
        with pytest.raises(InferenceServerException, match="no bundle 'none"):
            client.load_model("none")
        assert client.is_server_ready()
