"""The description is of what is really served, neither more nor less."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from agent.access.access import Access
from agent.access.callers import NEEDS
from agent.config import Config
from agent.gateway import Gateway
from agent.http.openapi import Described, document
from agent.http.v2 import V2
from agent.repository import Repository
from agent.telemetry import Telemetry
from targets.tensor import Contract, DimRange, DType
from tests.support.bundles import dense


@pytest.fixture(scope="module")
def contract() -> Contract:
    inputs = dense("x", DType.FLOAT32, "n", 8, largest=64), dense("at", DType.INT64, largest=1)
    return Contract(inputs, (dense("y", DType.FLOAT16, "n", largest=8),), {"n": DimRange(1, 4, 8)})


@pytest.fixture(scope="module")
def described(contract: Contract) -> dict[str, Any]:
    return document("1.2.3", [Described("pick", contract, True)])


async def routed() -> set[tuple[str, str]]:
    """Method and path of every route; a GET is a HEAD too."""
    config = Config()
    gateway = Gateway(config, Telemetry())
    app = V2(
        gateway, Repository(config, gateway, 0, lambda _: pytest.fail("nothing is loaded")), Access(config), config, "0"
    ).application()
    gateway.close()
    return {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def test_every_route_is_described_and_nothing_else_is(described: dict[str, Any]) -> None:
    found = {(method, path) for path, methods in document("0", [])["paths"].items() for method in methods}
    assert found == asyncio.run(routed())


def test_every_route_says_what_it_needs(described: dict[str, Any]) -> None:
    """What the table of access lacks would be for administrators alone."""
    for method, path in asyncio.run(routed()):
        assert f"{method.upper()} {path.replace('/versions/{version}', '')}" in NEEDS
    open_to_all = {path for path, methods in described["paths"].items() if methods.get("get", {}).get("security") == []}
    assert "/v2/health/live" in open_to_all
    assert "/metrics" not in open_to_all


def test_it_is_valid(described: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(described).validate()


def test_operations_have_names_and_what_their_paths_name(described: dict[str, Any]) -> None:
    operations = [(path, each) for path, methods in described["paths"].items() for each in methods.values()]
    ids = [operation["operationId"] for _, operation in operations]
    assert len(set(ids)) == len(ids)
    for path, operation in operations:
        named = [each["name"] for each in operation["parameters"] if each["in"] == "path"]
        assert named == re.findall(r"{(\w+)}", path)


def test_a_model_is_described_by_its_contract(described: dict[str, Any]) -> None:
    body = described["paths"]["/v2/models/pick/infer"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "application/octet-stream", "image/jpeg", "image/png"}
    schema = described["components"]["schemas"]["infer.pick"]
    assert schema["properties"]["outputs"]["items"]["properties"]["name"]["enum"] == ["y"]
    x, at = schema["properties"]["inputs"]["items"]["anyOf"]
    assert (x["properties"]["name"], x["properties"]["datatype"]) == ({"const": "x"}, {"const": "FP32"})
    assert x["properties"]["shape"]["prefixItems"] == [
        {"type": "integer", "minimum": 1, "maximum": 8, "title": "n"},
        {"const": 8},
    ]
    assert at["properties"]["shape"] == {"type": "array", "maxItems": 0}
