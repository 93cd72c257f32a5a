"""Which kind of server answers at an address, and whether it serves the model whose tokens we write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx
from pydantic_core import from_json

from engine.api import Failed, Request, Sampling
from engine.remote.answer import Answer
from engine.remote.api import Address, Checkpoint, Chunk, Dialect, Facts, RemoteError
from engine.remote.sglang import SGLang
from engine.remote.sse import events
from engine.remote.vllm import VLLM

ASK_SECONDS = 10.0
PROBE_SECONDS = 120.0
"""A server that has just started compiles when its first request comes."""


async def identify(http: httpx.AsyncClient, address: Address, checkpoint: Checkpoint) -> tuple[Dialect, Facts]:
    """Asks the server what it is, then for two short answers. Raises RemoteError."""
    asking = _Asking(http, address)
    dialect: Dialect
    info = await asking.get("/model_info") or await asking.get("/get_model_info")
    if "model_path" in info:
        dialect, facts = SGLang(), await _sglang(asking, info)
    else:
        version = await asking.get("/version")
        if "version" not in version:
            raise RemoteError(
                f"what answers at {address.url} is neither SGLang nor vLLM: name the address of one with --engine"
            )
        dialect, facts = VLLM(), Facts(str(version["version"]), "", 0)
    facts = await _model(asking, dialect, facts, checkpoint)
    facts = replace(facts, same_vocabulary=await _vocabulary(asking, dialect, facts, checkpoint))
    facts = await _speaks_ids(asking, dialect, facts, checkpoint)
    return dialect, replace(facts, grammars=await _grammars(asking, dialect, facts, checkpoint))


class _Asking:
    def __init__(self, http: httpx.AsyncClient, address: Address) -> None:
        self.address = address
        self._http = http

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object there; empty where there is none. Raises RemoteError."""
        return _object(await self._request("GET", path))

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return _object(await self._request("POST", path, body))

    async def answer(self, dialect: Dialect, facts: Facts, request: Request, vocab_size: int) -> list[Chunk]:
        """The events of a short answer; the last one may be a problem. Raises RemoteError, and ValueError for what
        makes no sense."""
        body = dialect.body(request, facts)
        response = await self._request("POST", dialect.path, body, PROBE_SECONDS)
        if response.status_code != 200:
            return []
        answer, chunks = Answer(request, dialect.title, vocab_size), []
        async for data in events(response):
            chunk = dialect.chunk(data, answer.sampled, facts)
            for reply in answer.take(chunk):
                if isinstance(reply, Failed) and chunk.problem is None:
                    raise ValueError(reply.message)
            chunks.append(chunk)
        return chunks

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = ASK_SECONDS
    ) -> httpx.Response:
        url = self.address.url
        content = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(timeout):
                response = await self._http.request(method, path, content=content, timeout=timeout)
        except (httpx.RequestError, TimeoutError) as error:
            raise RemoteError(
                f"no engine answers at {url} ({error or type(error).__name__}): start it, or name another --engine"
            ) from error
        if response.status_code in (401, 403):
            raise RemoteError(
                f"the engine at {url} {'refuses our API key' if self.address.key else 'wants an API key'}: give it "
                "with --engine-key-file FILE, or in FT_ENGINE_KEY"
            )
        if response.status_code in (502, 503, 504):
            raise RemoteError(f"the engine at {url} is not ready ({path} answers {response.status_code}): wait for it")
        return response


def _object(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != 200:
        return {}
    try:
        body = from_json(response.content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


async def _sglang(asking: _Asking, info: Mapping[str, Any]) -> Facts:
    """Of the arguments that it was started with, two change what its answers are."""
    server = await asking.get("/server_info") or await asking.get("/get_server_info")
    context, most = server.get("context_length"), server.get("max_req_input_len")
    limits = [context if isinstance(context, int) else 0, most + 2 if isinstance(most, int) else 0]
    return Facts(
        version=str(server.get("version", "")),
        model=str(info["model_path"]),
        context_length=min(filter(None, limits), default=0),
        spare=1,  # some versions want less than their context, and a prompt of at most max_req_input_len
        weights=str(info.get("weight_version") or ""),
        repeats=not (server.get("incremental_streaming_output") or server.get("stream_output")),
        seeds=bool(server.get("enable_deterministic_inference")),
    )


async def _model(asking: _Asking, dialect: Dialect, facts: Facts, checkpoint: Checkpoint) -> Facts:
    """The model to ask for, and how much fits into its context. Raises RemoteError."""
    listed = (await asking.get("/v1/models")).get("data")
    entries = [one for one in listed if isinstance(one, dict) and "id" in one] if isinstance(listed, list) else []
    names, wanted = [str(one["id"]) for one in entries], asking.address.model
    if wanted and wanted not in names:
        raise RemoteError(
            f"{dialect.title} at {asking.address.url} has no model {wanted!r}: name one of {', '.join(names) or 'its'} "
            "with --engine-model"
        )
    if not names and not facts.model:
        raise RemoteError(f"{dialect.title} at {asking.address.url} lists no model: look at its /v1/models")
    chosen = entries[names.index(wanted) if wanted else 0] if entries else {}
    length = chosen.get("max_model_len")
    limits = [size for size in (length, facts.context_length) if isinstance(size, int) and size > 0]
    context = min(limits, default=checkpoint.context_length) - facts.spare
    if context <= 0:
        raise RemoteError(
            f"{dialect.title} at {asking.address.url} does not say how long its context is, nor does "
            f"{checkpoint.path}: take the folder with the model's config.json"
        )
    return replace(facts, model=str(chosen.get("id", facts.model)), context_length=context)


async def _vocabulary(asking: _Asking, dialect: Dialect, facts: Facts, checkpoint: Checkpoint) -> bool:
    """Whether it reads our sample as we do; False where it cannot be asked. Raises RemoteError for other tokens."""
    body = {"model": facts.model, "prompt": checkpoint.sample, "add_special_tokens": False}
    tokens = (await asking.post("/tokenize", body)).get("tokens")
    if not isinstance(tokens, list):
        return False
    if tokens != list(checkpoint.sample_ids):
        raise RemoteError(
            f"{facts.model} on {dialect.title} at {asking.address.url} has another vocabulary than {checkpoint.path}: "
            "--model names the folder of the same model (no weights are needed)"
        )
    return True


async def _speaks_ids(asking: _Asking, dialect: Dialect, facts: Facts, checkpoint: Checkpoint) -> Facts:
    """How it gives token ids back, seen in an answer of a few tokens. Raises RemoteError."""
    request = Request(uuid4().hex, checkpoint.prompt, Sampling(max_tokens=3, temperature=0.0))
    problem = "it sends no token ids"
    for seen in dialect.variants(facts):
        try:
            chunks = await asking.answer(dialect, seen, request, checkpoint.vocab_size)
        except ValueError as error:
            problem = " ".join(str(error).split())[:200]
            continue
        problem = next((chunk.problem.message for chunk in chunks if chunk.problem is not None), problem)
        if any(chunk.tokens for chunk in chunks):
            return seen
    raise RemoteError(
        f"{dialect.title} {facts.version} at {asking.address.url} cannot be spoken to in token ids ({problem}): "
        "a newer version can"
    )


async def _grammars(asking: _Asking, dialect: Dialect, facts: Facts, checkpoint: Checkpoint) -> bool:
    """Whether it follows a grammar of ours, which allows one answer alone."""
    *_, end = ids = checkpoint.grammar_ids
    sampling = Sampling(len(ids) + 1, temperature=0.0, constraint=checkpoint.grammar, stop_tokens=(end,))
    request = Request(uuid4().hex, checkpoint.prompt, sampling)
    answer = Answer(request, dialect.title, checkpoint.vocab_size)
    try:
        for chunk in await asking.answer(dialect, facts, request, checkpoint.vocab_size):
            list(answer.take(chunk))
    except ValueError:
        return False
    return tuple(answer.sampled) == ids
