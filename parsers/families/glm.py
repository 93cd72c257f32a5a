"""GLM and its relatives: the name stands bare behind the opener, keys and values are elements of their own."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import Call, Format, Pair, Result, Switches, Tagged, Think, Turns, by_level

_PARAMETERS = Tagged(open="<arg_key>", open_end="</arg_key>\n<arg_value>", close="</arg_value>", trim="none")
_DENSE = replace(_PARAMETERS, open_end="</arg_key><arg_value>", between="")

GLM45 = Format(
    name="glm45",
    models=("GLM-4.5", "GLM-4.6"),
    turns=Turns(
        system=Pair("<|system|>\n", ""),
        user=Pair("<|user|>\n", ""),
        assistant=Pair("<|assistant|>", ""),
        tools=Pair("<|observation|>", ""),
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    think=Think("<think>", "</think>", inner="", after="\n"),
    call=Call("<tool_call>", "</tool_call>", _PARAMETERS, header="{name}\n", first="\n"),
    result=Result("\n", "<tool_response>", "</tool_response>", inner="\n"),
)

GLM47 = replace(
    GLM45,
    name="glm47",
    models=("GLM-4.7", "GLM-5", "GLM-5.2"),
    turns=replace(GLM45.turns, system=Pair("<|system|>", ""), user=Pair("<|user|>", "")),
    think=Think("<think>", "</think>", "", ""),
    call=Call("<tool_call>", "</tool_call>", _DENSE, header="{name}", between=""),
    result=Result("", "<tool_response>", "</tool_response>"),
    switches=Switches(always={"clear_thinking": False}),
)

GLM53 = replace(
    GLM47,
    name="glm53",
    models=("GLM-5.3",),
    switches=replace(
        GLM47.switches,
        on={},
        off={"reasoning_effort": "low"},
        efforts=by_level("reasoning_effort", "low", "high", "max"),
    ),
)

LING3 = replace(
    GLM45,
    name="ling3",
    models=("Ling-3",),
    turns=Turns.framed("<role>{}</role>", "<|role_end|>", "SYSTEM HUMAN ASSISTANT OBSERVATION"),
    think=Think("<think>", "</think>", "", ""),
    call=replace(GLM45.call, header="{name}", codec=replace(_PARAMETERS, between=""), tail="\n"),
)


def _suffixed(tag: str) -> tuple[str, str]:
    return f"<{tag}{{suffix}}>", f"</{tag}{{suffix}}>"


HY3 = replace(
    GLM45,
    name="hy3",
    models=("Hy3",),
    turns=Turns(
        system=Pair("", ""),
        user=Pair("<｜hy_User{suffix}｜>", ""),
        assistant=Pair("<｜hy_Assistant{suffix}｜>", "<｜hy_eos{suffix}｜>"),
        tools=Pair(*_suffixed("tool_responses")),
    ),
    think=Think(*_suffixed("think"), "", ""),
    call=Call(
        *_suffixed("tool_call"),
        Tagged("<arg_key{suffix}>", "</arg_key{suffix}>\n<arg_value{suffix}>", "</arg_value{suffix}>", "none"),
        header="{name}<tool_sep{suffix}>\n",
        section=Pair(*_suffixed("tool_calls")),
        around="\n",
    ),
    result=Result("\n", *_suffixed("tool_response"), inner="\n"),
    switches=Switches(
        always={"preserved_thinking": True},
        on={"reasoning_effort": "high"},
        off={"reasoning_effort": "no_think"},
        efforts=by_level("reasoning_effort", "low", "high"),
    ),
    suffix=r"<think(:[\w-]+)>",
)
