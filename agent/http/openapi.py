"""What the agent serves, as an OpenAPI 3.1 description: one table of operations, and the models that are loaded. Pure.

The infer of every model stands there twice: for whichever model, and for itself, with the inputs that it takes. What a
schema cannot say (dimensions that agree, as much data as a shape needs) is said by the answer to a wrong request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from agent.access.callers import need_of
from agent.calls import REQUEST_ID, TRACE_PARENT
from agent.http.classification import MOST_CLASSES
from agent.http.codecs import HEADER_LENGTH
from agent.http.hints import TIMEOUT
from agent.page.status import Status
from targets.tensor import FROM_OIP, Contract, TensorSpec

Schema = dict[str, Any]


@dataclass(frozen=True)
class Described:
    """A model that is loaded: its name, what it takes, and whether it takes images."""

    name: str
    contract: Contract
    images: bool


def document(version: str, models: Iterable[Described]) -> dict[str, Any]:
    """The description, of that version of the agent."""
    paths, schemas = dict(_paths()), dict(_SCHEMAS)
    for model in models:
        path = f"/v2/models/{model.name}/infer"
        schemas[f"infer.{model.name}"] = _request_of(model.contract)
        body = {"application/json": _ref(f"infer.{model.name}"), "application/octet-stream": {}}
        if model.images:
            body |= {"image/jpeg": {}, "image/png": {}}
        infer = _Operation("post", path, f"infer.{model.name}", f"Run {model.name}", _INFERRED, body, _URGENCY)
        paths[path] = {"post": infer.described()}
    info = {"title": "tightfit-agent", "version": version, "description": "Open Inference Protocol v2"}
    return {
        "openapi": "3.1.0",
        "info": info,
        "security": _SECURITY,
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _SCHEMES},
    }


_SCHEMES = {
    "token": {"type": "http", "scheme": "bearer"},
    "certificate": {"type": "mutualTLS", "description": "a certificate of the client's"},
}
# What the agent is configured to ask for, which may be nothing.
_SECURITY: list[dict[str, list[str]]] = [{}, {"token": []}, {"certificate": []}]

# --- schemas


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: str = "", **properties: Schema) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required.split()} if required else schema


def _array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_STRING: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 1024}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}
_DURATION = _object("count ns", count=_COUNT, ns=_COUNT)
_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_COMPUTED = {name: _DURATION for name in _DURATIONS if name.startswith("compute")}
_DATATYPE: Schema = {"type": "string", "enum": sorted(FROM_OIP)}
_PARAMETERS: Schema = {
    "type": "object",
    "additionalProperties": {"type": ["boolean", "integer", "number", "string", "null"]},
}
_SHAPE = _array({**_COUNT, "maximum": 1 << 40})
_DATA: Schema = {"type": "array", "description": "flat, or nested as the shape, in row-major order"}
_WISH = {
    **_PARAMETERS,
    "properties": {
        "binary_data": _FLAG,
        "classification": {"type": "integer", "minimum": 1, "maximum": MOST_CLASSES},
    },
}
_REQUEST_PARAMETERS = {
    **_PARAMETERS,
    "properties": {
        "timeout": {**_COUNT, "description": "microseconds; 0: as the agent is configured"},
        "priority": {
            "type": "integer",
            "minimum": 0,
            "maximum": 255,
            "description": "1 is the highest; 0: the model's",
        },
        "binary_data_output": _FLAG,
        "sequence_id": {"type": ["integer", "string"], "minimum": 0, "maxLength": 128},
        "sequence_start": _FLAG,
        "sequence_end": _FLAG,
    },
}
_TENSOR = _object(
    "name datatype shape", name=_STRING, datatype=_DATATYPE, shape=_array({"type": "integer", "minimum": -1})
)
_OUTPUTS = _array(_object("name", name=_NAME, parameters=_WISH))
_ID: Schema = {"type": "string", "maxLength": 4096}

_SCHEMAS: dict[str, Schema] = {
    "error": _object("error", error=_STRING),
    "server": _object("name version extensions", name=_STRING, version=_STRING, extensions=_array(_STRING)),
    "live": _object("live", live=_FLAG),
    "ready": _object("ready", ready=_FLAG, name=_STRING),
    "model": _object(
        "name versions platform inputs outputs",
        name=_STRING, versions=_array(_STRING), platform=_STRING, inputs=_array(_TENSOR), outputs=_array(_TENSOR),
        parameters=_PARAMETERS,
    ),
    "config": {
        **_object(
            "name platform max_batch_size input output",
            name=_STRING, platform=_STRING, max_batch_size=_COUNT,
            input=_array(_object("name data_type dims")), output=_array(_object("name data_type dims")),
        ),
        "description": "as Triton's model_config.proto",
    },
    "inferRequest": _object(
        "inputs",
        id={"type": ["string", "null"], "maxLength": 4096}, parameters=_REQUEST_PARAMETERS, outputs=_OUTPUTS,
        inputs=_array(_object("name datatype shape", name=_NAME, datatype=_DATATYPE, shape=_SHAPE,
                              parameters=_PARAMETERS, data=_DATA)),
    ),
    "inferAnswer": _object(
        "model_name model_version outputs",
        model_name=_STRING, model_version=_STRING, id=_ID,
        outputs=_array(_object("name datatype shape", name=_STRING, datatype=_DATATYPE, shape=_array(_COUNT),
                               parameters=_PARAMETERS, data=_DATA)),
    ),
    "imageAnswer": {
        **_object("model_name model_version", model_name=_STRING, model_version=_STRING),
        "additionalProperties": {"type": "array"},
    },
    "statistics": _object(
        "model_stats",
        model_stats=_array(
            _object(
                "name version last_inference inference_count execution_count inference_stats batch_stats",
                name=_STRING, version=_STRING, last_inference=_COUNT, inference_count=_COUNT, execution_count=_COUNT,
                inference_stats=_object(" ".join(_DURATIONS), **dict.fromkeys(_DURATIONS, _DURATION)),
                response_stats={"type": "object"},
                batch_stats=_array(_object(" ".join(("batch_size", *_COMPUTED)), batch_size=_COUNT, **_COMPUTED)),
                memory_usage=_array(_object("type id byte_size", type=_STRING, id=_COUNT, byte_size=_COUNT)),
            )
        ),
    ),
    "index": _array(_object("name version state reason", name=_STRING, version=_STRING, state=_STRING, reason=_STRING)),
    "indexRequest": {**_object(ready=_FLAG), "additionalProperties": False},
    "loadRequest": {
        **_object(parameters={**_object(bundle=_STRING), "additionalProperties": False}),
        "additionalProperties": False,
    },
    "unloadRequest": {
        **_object(parameters={**_object(unload_dependents={}), "additionalProperties": False}),
        "additionalProperties": False,
    },
    "generateRequest": _object("text_input", text_input=_STRING, parameters={"type": "object"}),
    "generateAnswer": _object(
        "model_name model_version text_output",
        model_name=_STRING, model_version=_STRING, text_output=_STRING, details={"type": "object"},
    ),
    "settings": {"type": "object"},
    "regions": _array({"type": "object"}),
    **msgspec.json.schema_components([Status], ref_template="#/components/schemas/{name}")[1],
}  # fmt: skip


def _request_of(contract: Contract) -> Schema:
    """A request for a model with that contract."""
    one_each = {"minItems": len(contract.inputs), "maxItems": len(contract.inputs)}
    inputs = _array({"anyOf": [_input_of(spec, contract) for spec in contract.inputs]}, **one_each)
    names = {"type": "string", "enum": [spec.name for spec in contract.outputs]}
    outputs = _array(_object("name", name=names, parameters=_WISH), uniqueItems=True)
    return _object("inputs", id=_ID, parameters=_REQUEST_PARAMETERS, inputs=inputs, outputs=outputs)


def _input_of(spec: TensorSpec, contract: Contract) -> Schema:
    sizes = [_size(dim, contract) for dim in spec.shape]
    shape = {"type": "array", "prefixItems": sizes, "minItems": len(sizes), "maxItems": len(sizes)}
    return _object(
        "name datatype shape", name={"const": spec.name}, datatype={"const": spec.dtype.oip},
        shape=shape if sizes else {"type": "array", "maxItems": 0}, parameters=_PARAMETERS, data=_DATA,
    )  # fmt: skip


def _size(dim: int | str, contract: Contract) -> Schema:
    if isinstance(dim, int):
        return {"const": dim}
    sizes = contract.dims[dim]
    return {"type": "integer", "minimum": sizes.min, "maximum": sizes.max, "title": dim}


# --- operations

_JSON = "application/json"
_FRAMINGS = ("application/x-ndjson", "application/vnd.tightfit.frames", "multipart/mixed", "multipart/x-mixed-replace")


def _header(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "required": False, "schema": schema}


_ECHOED = (_header(REQUEST_ID, _STRING), _header(TRACE_PARENT, _STRING))
_URGENCY = (
    _header("Priority", _STRING),
    _header(TIMEOUT, {"type": "integer", "minimum": 1, "maximum": 10**12}),
)
_LENGTH = _header(HEADER_LENGTH, _COUNT)


@dataclass(frozen=True)
class _Operation:
    """One method of one path. `answer` and `body` are schemas by media type; without `body` none is read, and without
    `answer` none is sent."""

    method: str
    path: str
    id: str
    summary: str
    answer: Mapping[str, Schema]
    body: Mapping[str, Schema] | None = None
    headers: tuple[Schema, ...] = ()
    body_required: bool = True
    query: Mapping[str, Schema] | None = None

    def described(self) -> dict[str, Any]:
        names = re.findall(r"\{(\w+)\}", self.path)
        parameters = [{"name": name, "in": "path", "required": True, "schema": _STRING} for name in names]
        parameters += [*self.headers, *_ECHOED]
        for name, schema in (self.query or {}).items():
            parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
        errors = {"description": "Why not", "content": _content({_JSON: _ref("error")})}
        answered: Schema = {"description": "Done"}
        if self.answer:
            answered["content"] = _content(self.answer)
        described: dict[str, Any] = {
            "operationId": self.id,
            "summary": self.summary,
            "parameters": parameters,
            "responses": {"200": answered, "4XX": errors, "5XX": errors},
        }
        if not need_of(self.method.upper(), self.path).roles:
            described["security"] = []
        if self.body is not None:
            described["requestBody"] = {"required": self.body_required, "content": _content(self.body)}
        return described


def _content(schemas: Mapping[str, Schema]) -> dict[str, Any]:
    return {media_type: {"schema": schema} if schema else {} for media_type, schema in schemas.items()}


def _json(name: str) -> dict[str, Schema]:
    return {_JSON: _ref(name)}


_INFERRED = {**_json("inferAnswer"), "application/octet-stream": {}}
_EVENTS: dict[str, Schema] = {"text/event-stream": {}}
_RECORDS: dict[str, Schema] = {media_type: {} for media_type in _FRAMINGS}
_FOLLOWED = {**_EVENTS, **_RECORDS}
_SINCE = {"since": _STRING, "policy": {"type": "string", "enum": ["latest", "block", "close"]}}
_IMAGE: dict[str, Schema] = {"image/jpeg": {}, "image/png": {}, "application/octet-stream": {}}
_INFER = {**_json("inferRequest"), **_IMAGE}
_URGENT = (*_URGENCY, _LENGTH)


def _both(operation: _Operation) -> Sequence[_Operation]:
    """The same of a model in whichever version, and in one alone."""
    path = operation.path.replace("{model}", "{model}/versions/{version}")
    return operation, _Operation(**{**vars(operation), "path": path, "id": f"{operation.id}OfVersion"})


_MODEL = "/v2/models/{model}"
_OPERATIONS: tuple[_Operation, ...] = (
    _Operation("get", "/v2", "server", "What the server is", _json("server")),
    _Operation("get", "/v2/health/live", "live", "Whether it runs", _json("live")),
    _Operation("get", "/v2/health/ready", "ready", "Whether every model can be asked", _json("ready")),
    _Operation("get", "/v2/openapi.json", "openapi", "This description", {_JSON: {}}),
    _Operation("get", "/metrics", "metrics", "Counters and gauges",
               {"text/plain": {}, "application/openmetrics-text": {}}),
    *_both(_Operation("get", _MODEL, "model", "What a model takes and gives", _json("model"))),
    *_both(_Operation("get", f"{_MODEL}/ready", "modelReady", "Whether it can be asked", _json("ready"))),
    *_both(_Operation("get", f"{_MODEL}/config", "config", "Its configuration, as Triton's", _json("config"))),
    *_both(_Operation("get", f"{_MODEL}/stats", "statistics", "What it has done", _json("statistics"))),
    *_both(_Operation("post", f"{_MODEL}/infer", "infer", "Run a model", _INFERRED, _INFER, _URGENT)),
    *_both(_Operation("post", f"{_MODEL}/image", "image", "An image in", _json("imageAnswer"), _IMAGE, _URGENCY)),
    *_both(
        _Operation("post", f"{_MODEL}/stream", "stream", "Records in, records out",
                   _FOLLOWED, _RECORDS, _URGENCY)
    ),
    *_both(
        _Operation("post", f"{_MODEL}/generate", "generate", "Text in, text out",
                   _json("generateAnswer"), _json("generateRequest"), _URGENCY)
    ),
    *_both(
        _Operation("post", f"{_MODEL}/generate_stream", "generateStream", "Text in, text out, token by token",
                   _EVENTS, _json("generateRequest"), _URGENCY)
    ),
    _Operation("get", "/", "page", "The status page, for people", {"text/html": {}}),
    _Operation("get", "/v2/status", "status", "The agent at one glance, as the page shows it", _json("Status")),
    _Operation("get", f"{_MODEL}/results/picture", "picture", "The newest image that a model answered",
               {"image/jpeg": {}, "image/png": {}}),
    _Operation("get", f"{_MODEL}/results", "results", "Follow what a model answers", _FOLLOWED, query=_SINCE),
    _Operation("get", "/v2/events", "events", "Follow what happens to models", _FOLLOWED, query=_SINCE),
    _Operation("get", "/v2/models/stats", "allStatistics", "What all models have done", _json("statistics")),
    _Operation("post", "/v2/repository/index", "index", "Models that there are",
               _json("index"), _json("indexRequest"), body_required=False),
    _Operation("post", "/v2/repository/models/{model}/load", "load", "Load a model, or what it has become",
               {}, _json("loadRequest"), body_required=False),
    _Operation("post", "/v2/repository/models/{model}/unload", "unload", "Unload a model",
               {}, _json("unloadRequest"), body_required=False),
    *(
        _Operation(method, path, f"{does}{of}", f"{does.capitalize()} {what} settings",
                   _json("settings"), _json("settings") if method == "post" else None, body_required=False)
        for path, of, what in (
            ("/v2/trace/setting", "Trace", "trace"),
            (f"{_MODEL}/trace/setting", "ModelTrace", "a model's trace"),
            ("/v2/logging", "Logging", "log"),
        )
        for method, does in (("get", "show"), ("post", "set"))
    ),
    *(
        _Operation(method, f"/v2/{kind}sharedmemory/{path}", f"{id_}{kind.capitalize()}", f"{summary} ({kind})", answer,
                   None if method == "get" else {_JSON: {}}, body_required=False)
        for kind in ("system", "cuda")
        for method, path, id_, summary, answer in (
            ("get", "status", "regions", "Shared memory: there is none", _json("regions")),
            ("get", "region/{region}/status", "region", "A region: there is none", _json("regions")),
            ("post", "region/{region}/register", "register", "Refused", {}),
            ("post", "region/{region}/unregister", "unregister", "Refused", {}),
            ("post", "unregister", "unregisterAll", "Refused", {}),
        )
    ),
)  # fmt: skip


@cache
def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = operation.described()
    return paths
