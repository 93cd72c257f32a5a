"""The features of Chat Completions and of Completions, each with a case or more."""

from __future__ import annotations

import json
from typing import Any

from tests.server.contract import Case
from tests.server.contract_common import (
    END,
    GRAMMAR,
    HELLO,
    MORE,
    ROME,
    SCHEMA,
    THOUGHT,
    USER,
    cached,
    call,
    constrained,
)
from tests.server.support import Answer

FEATURES = (
    "text",
    "tools",
    "tool_choice",
    "custom tools",
    "reasoning_content",
    "developer",
    "usage",
    "logprobs",
    "n",
    "seed",
    "stop",
    "penalties",
    "logit_bias",
    "response_format",
    "max_completion_tokens",
    "functions",
    "images",
    "errors",
    "models",
)
RAW = ("text", "token ids", "echo", "n", "stop", "logprobs", "sampling", "max_tokens", "suffix", "errors")
"""In the words of the issue, or nearly."""

CHAT = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OLD = {"name": "weather", "parameters": SCHEMA}
SAY_CHAT = {"type": "custom", "custom": {"name": "say", "format": {"type": "grammar", "grammar": GRAMMAR}}}


def replied(client: Any, made: Any) -> Any:
    message = made.choices[0].message.model_dump(exclude_none=True)
    message = {key: value for key, value in message.items() if key != "parsed"}
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "ALPHA"} for one in message.get("tool_calls", ())]
    return client.chat.completions.create(
        model="local-moe", messages=[USER, message, *(results or [MORE])], tools=[CHAT, SAY_CHAT]
    )


def answered(client: Any, made: Any) -> Any:
    """As functions are, which have no ids."""
    message = made.choices[0].message.model_dump(exclude_none=True)
    output = {"role": "function", "name": "weather", "content": "ALPHA"}
    return client.chat.completions.create(model="local-moe", messages=[USER, message, output], functions=[OLD])


def first(made: Any) -> Any:
    return made.choices[0].message


def of_sampling(**fields: Any) -> Any:
    return lambda request: all(getattr(request.sampling, name) == value for name, value in fields.items())


def chat(feature: str, ask: dict[str, Any] | None = None, answer: Any = HELLO, *args: Any, **more: Any) -> Case:
    return Case("chat", feature, ask or {}, answer, *args, **more)


BOTH = [CHAT, SAY_CHAT]
CASES = [
    chat("text", holds=lambda made: (first(made).content, made.choices[0].finish_reason) == ("Hello", "stop")),
    chat(
        "tools",
        {"tools": [CHAT]},
        ROME,
        lambda made: (
            json.loads(first(made).tool_calls[0].function.arguments) == {"city": "Rome"}
            and made.choices[0].finish_reason == "tool_calls"
        ),
    ),
    chat("tools", {"tools": BOTH}, ROME, then=(replied,), prompt=("Rome", "ALPHA"), spliced=True),
    chat("tool_choice", {"tools": [CHAT], "tool_choice": "required"}, ROME, sampled=constrained("weather")),
    chat(
        "tool_choice",
        {"tools": [CHAT], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ROME,
        sampled=constrained("weather"),
    ),
    chat("tool_choice", {"tools": [CHAT], "tool_choice": "none"}, ROME, lambda made: not first(made).tool_calls),
    chat("custom tools", {"tools": BOTH}, f"{THOUGHT}{call('say', input='haa')}{END}", sampled=constrained("ha+")),
    chat("reasoning_content", holds=lambda made: first(made).reasoning_content.strip() == "A plan."),
    chat(
        "reasoning_content",
        {"tools": BOTH},
        then=(replied,),
        prompt=("Hi", "Hello", "More"),
    ),
    chat("developer", {"messages": [{"role": "developer", "content": "ALPHA"}, USER]}, prompt=("ALPHA", "Hi")),
    chat(
        "usage",
        {},
        cached,
        lambda made: (
            made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
            and made.usage.prompt_tokens_details.cached_tokens == 16
            and made.usage.completion_tokens_details.reasoning_tokens > 0
        ),
    ),
    chat(
        "logprobs",
        {"logprobs": True, "top_logprobs": 2},
        holds=lambda made: (
            "".join(one.token for one in made.choices[0].logprobs.content).strip() == "Hello"
            and all(len(one.top_logprobs) == 2 for one in made.choices[0].logprobs.content)
        ),
    ),
    chat(
        "n",
        {"n": 3, "seed": 7},
        lambda request: Answer(f"{THOUGHT}{request.sampling.seed}{END}"),
        lambda made: sorted(choice.message.content for choice in made.choices) == ["7", "8", "9"],
    ),
    chat("seed", {"seed": 7}, sampled=of_sampling(seed=7)),
    chat(
        "stop",
        {"stop": ["four", " two"]},
        f"{THOUGHT}one two three{END}",
        lambda made: (first(made).content, made.choices[0].finish_reason) == ("one", "stop"),
    ),
    chat(
        "penalties",
        {"presence_penalty": 0.25, "frequency_penalty": -0.25, "extra_body": {"repetition_penalty": 1.1}},
        sampled=of_sampling(presence_penalty=0.25, frequency_penalty=-0.25, repetition_penalty=1.1),
    ),
    chat("logit_bias", {"logit_bias": {"65": 5}}, sampled=of_sampling(logit_bias=((65, 5.0),))),
    chat(
        "response_format",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}},
        f'{THOUGHT}{{"city": "Rome"}}{END}',
        lambda made: json.loads(first(made).content) == {"city": "Rome"},
        sampled=constrained("city"),
    ),
    chat("response_format", {"response_format": {"type": "json_object"}}, sampled=constrained("%json")),
    chat(
        "max_completion_tokens",
        {"max_completion_tokens": 9},
        holds=lambda made: made.choices[0].finish_reason == "length",
    ),
    chat(
        "functions",
        {"functions": [OLD]},
        ROME,
        lambda made: (
            json.loads(first(made).function_call.arguments) == {"city": "Rome"}
            and made.choices[0].finish_reason == "function_call"
        ),
    ),
    chat("functions", {"functions": [OLD], "function_call": {"name": "weather"}}, ROME, sampled=constrained("weather")),
    chat("functions", {"functions": [OLD]}, ROME, then=(answered,), prompt=("Rome", "ALPHA")),
    chat(
        "images",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        refused="image_url",
    ),
    chat("errors", {"messages": [{"role": "user", "content": "word " * 9000}]}, refused="maximum context length"),
    chat("errors", {"top_logprobs": 2}, refused="top_logprobs needs logprobs"),
    chat("errors", {"model": "gpt-9"}, refused="gpt-9"),
    chat(
        "models",
        then=(
            lambda client, made: client.models.list(),
            lambda client, page: client.models.retrieve(page.data[0].id),
        ),
        holds=lambda model: (model.id, model.object) == ("local-moe", "model"),
    ),
]


def raw(
    feature: str, ask: dict[str, Any] | None = None, answer: Any = f" upon a time{END}", *args: Any, **more: Any
) -> Case:
    return Case("completions", feature, ask or {}, answer, *args, **more)


COMPLETIONS = [
    raw("text", holds=lambda made: (made.choices[0].text, made.choices[0].finish_reason) == (" upon a time", "stop")),
    raw("token ids", {"prompt": [97, 98, 99]}, sampled=lambda request: request.tokens == (97, 98, 99)),
    raw("echo", {"echo": True}, holds=lambda made: made.choices[0].text == "Once upon a time"),
    raw(
        "n",
        {"prompt": ["a", "bc"], "n": 2, "seed": 7},
        lambda request: Answer(f"{len(request.tokens)}.{request.sampling.seed}{END}"),
        lambda made: (
            [one.text for one in sorted(made.choices, key=lambda one: one.index)] == ["1.7", "1.8", "2.7", "2.8"]
        ),
    ),
    raw("stop", {"stop": " a "}, holds=lambda made: made.choices[0].text == " upon"),
    raw("logprobs", {"logprobs": 1}, holds=lambda made: "".join(made.choices[0].logprobs.tokens) == " upon a time"),
    raw(
        "sampling",
        {"temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 0.25, "logit_bias": {"65": 5}},
        sampled=of_sampling(temperature=0.5, top_p=0.9, seed=3, presence_penalty=0.25, logit_bias=((65, 5.0),)),
    ),
    raw(
        "max_tokens",
        {"max_tokens": 4},
        holds=lambda made: (made.choices[0].text, made.choices[0].finish_reason) == (" upo", "length"),
    ),
    raw("suffix", {"suffix": "end"}, refused="suffix"),
    raw("errors", {"prompt": "word " * 9000}, refused="maximum context length"),
]
