"""Hermes: calls as JSON objects between tags (Qwen2.5, Qwen3, Granite 4 and their relatives), in ChatML turns."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import Call, Format, JsonCall, Result, Think, ToolsText, Turns

CHATML_TURNS = Turns(
    system="<|im_start|>system\n",
    user="<|im_start|>user\n",
    assistant="<|im_start|>assistant\n",
    tools="<|im_start|>user",
    end="<|im_end|>",
    tail="\n",
    stops=("<|endoftext|>",),
)

HERMES = Format(
    name="hermes",
    turns=CHATML_TURNS,
    think=Think("<think>", "</think>"),
    call=Call("<tool_call>", "</tool_call>", JsonCall()),
    result=Result("\n", "<tool_response>", "</tool_response>"),
)

CHATML = replace(
    HERMES,
    name="chatml",
    think=None,
    tools_text=ToolsText(
        before="## Tools\n\nThese functions can be called, one JSON description per line:\n\n<tools>\n",
        after="</tools>\n\nWrite each call as one JSON object between tags:\n\n"
        '<tool_call>\n{"name": "the_name", "arguments": {"first": "value"}}\n</tool_call>',
    ),
)
"""ChatML checkpoints whose template ignores tools: calls are spelled the Hermes way and written by the format."""
