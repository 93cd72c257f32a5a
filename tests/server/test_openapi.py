"""The server's own description: complete, and true of every request that it allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from parsers.load import Family
from server.app import create_app
from server.openapi import document
from server.protocols.base import Wire
from tests.server.support import served, serving
from tests.server.test_websocket import talking

EXAMPLES, MANY = 10, 1000
ANSWER = "Look.</think>\n\nYes.<|im_end|>"
CHECKS: Any = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance
]  # fmt: skip


@schemathesis.serializer("application/x-ndjson")
def lines(context: Any, value: Any) -> bytes:
    return (value if isinstance(value, str) else json.dumps(value)).encode(errors="surrogatepass")


SCHEMA: Any = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def url(family: Family) -> Iterator[str]:
    with served(family, ANSWER) as (server, _):
        yield server.url


def hold(operation: Any, url: str, examples: int) -> int:
    """Requests as the description allows them, and others, get answers as it says, and none waits for ever. How many
    they were: an operation without parameters has fewer than were asked for."""
    sent = 0
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    cases = hypothesis.strategies.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=examples == EXAMPLES,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases)
    def each(case: Any) -> None:
        nonlocal sent
        sent += 1
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=30)

    each()
    return sent


OPERATIONS = {f"{one.ok().method} {one.ok().path}": one.ok() for one in SCHEMA.get_all_operations()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_generated_requests(url: str, name: str) -> None:
    hold(OPERATIONS[name], url, EXAMPLES)


@pytest.mark.deep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_generated_requests(url: str, name: str) -> None:
    print(f"{name}: {hold(OPERATIONS[name], url, MANY)} requests")


@pytest.mark.anyio
async def test_every_route_is_described(family: Family) -> None:
    async with serving(family) as server:
        app = create_app(server.state)
        theirs = (await server.http().get("/openapi.json")).json()
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {(method, path) for path, item in theirs["paths"].items() for method in item}
    assert described == routes
    assert theirs == document()


def test_the_description_says_what_the_models_read() -> None:
    schemas = document()["components"]["schemas"]
    assert {"ChatRequest", "MessagesRequest", "Text", "chat.Message", "anthropic.Message"} <= schemas.keys()
    assert not [name for name in schemas if "_" in name.partition(".")[0].strip("s") and "__" in name]
    assert {"functions", "function_call"} <= schemas["ChatRequest"]["properties"].keys()
    assert "function" in schemas["chat.Message"]["properties"]["role"]["enum"]
    assert "function_call" in schemas["chat.Message"]["properties"]
    assert schemas["CompletionsRequest"]["properties"]["prompt"]["anyOf"][0] == {"type": "string"}
    assert schemas["anthropic.Message"]["properties"]["content"]["anyOf"][0] == {"type": "string"}
    assert schemas["MessagesRequest"]["properties"]["max_tokens"] == {"minimum": 0, "type": "integer"}


def test_no_model_takes_the_name_of_a_private_one() -> None:
    def below(model: type[Wire]) -> Iterator[type[Wire]]:
        for one in model.__subclasses__():
            yield from (one, *below(one))

    names = {model.__name__ for model in below(Wire)}
    assert not {name for name in names if f"_{name}" in names}


def test_every_reference_leads_somewhere() -> None:
    schemas = document()["components"]["schemas"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key == "$ref" or (key == "mapping" and isinstance(item, dict)):
                    yield from item.values() if isinstance(item, dict) else [item]
                yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    found = set(references(document()))
    assert found
    assert {name.removeprefix("#/components/schemas/") for name in found} <= schemas.keys()


@pytest.mark.anyio
async def test_the_frames_of_the_socket_are_as_described(family: Family) -> None:
    described = document()["paths"]["/v1/responses"]["get"]["x-websocket"]
    good = {"type": "response.create", "model": "local-moe", "input": "Hi"}
    async with serving(family, ANSWER) as server, talking(server) as talk:
        await talk.create(input="Hi")
        frames = await talk.until_end()
        await talk.create(input=3)
        (wrong,) = await talk.until_end()
    assert all(valid(described["client"], one) for one in (good, {**good, "generate": False}))
    assert not valid(described["client"], {**good, "type": "response.cancel"})
    assert all(valid(described["server"], frame) for frame in (*frames, wrong))
    assert wrong["type"] == "error"
    assert not valid({"$ref": "#/components/schemas/ErrorEvent"}, frames[0])


def valid(schema: Any, value: Any) -> bool:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document()["components"]}).is_valid(value)
