"""Kimi: K2 names the tool inside the call's id; K3 writes elements from three control tokens."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import (
    Answer,
    Call,
    Format,
    Json,
    Pair,
    Result,
    Switches,
    Tagged,
    Think,
    Tolerances,
    Turns,
    by_level,
)

K2 = Format(
    name="kimi_k2",
    models=("Kimi-K2-Instruct", "Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2.7"),
    turns=Turns.framed(
        "<|im_{}|>{}<|im_middle|>",
        "<|im_end|>",
        tools="<|im_system|>tool<|im_middle|>",
        stops=("[EOS]",),
        others=("<|im_system|>tool_declare<|im_middle|>",),
    ),
    think=Think("<think>", "</think>", "", ""),
    call=Call(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        Json(),
        header="functions.{name}:{n}<|tool_call_argument_begin|>",
        section=Pair("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        between="",
    ),
    result=Result("", "## Return of {id}\n", ""),
    switches=Switches(on={"thinking": True}, off={"thinking": False}),
    call_ids="numbered",
    tolerances=Tolerances(
        aliases={
            "<|tool_calls_section_begin|>": ("<|tool_call_section_begin|>",),
            "<|tool_calls_section_end|>": ("<|tool_call_section_end|>",),
        }
    ),
)


def _element(tag: str) -> tuple[str, str]:
    return f"<|open|>{tag}<|sep|>", f"<|close|>{tag}<|sep|>"


K3 = Format(
    name="kimi_k3",
    models=("Kimi-K3",),
    turns=Turns.framed(
        '<|open|>message role="{}"<|sep|>',
        "<|close|>message<|sep|>",
        tools='<|open|>message role="tool"',
        tail="<|end_of_msg|>",
        stops=("<|end_of_msg|>",),
    ),
    think=Think(*_element("think"), "", ""),
    answer=Answer(*_element("response"), always=True),
    call=Call(
        "<|open|>call",
        "<|close|>call<|sep|>",
        Tagged(
            open='<|open|>argument key="',
            key_end='" type="',
            open_end='"<|sep|>',
            close="<|close|>argument<|sep|>",
            trim="none",
            typed="type",
            escapes=True,
            between="",
            whole=Pair('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
        ),
        header=' tool="{name}" index="{n1}"<|sep|>',
        section=Pair(*_element("tools")),
        between="",
    ),
    result=Result("", ' tool="{name}" index="{n1}"<|sep|>', ""),
    switches=replace(K2.switches, efforts=by_level("thinking_effort", "low", "high", "max")),
    encoder="kimi_k3",
)
