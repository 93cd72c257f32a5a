"""GLM and its relatives: the name stands bare behind the opener, keys and values are elements of their own."""

from __future__ import annotations

from dataclasses import replace

from parsers.format import Call, Format, Pair, Result, Switches, Tagged, Think, Turns, by_level

_PARAMETERS = Tagged(open="<arg_key>", open_end="</arg_key>\n<arg_value>", close="</arg_value>", trim="none")

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
    think=Think("<think>", "</think>", inner="", after=""),
    call=replace(
        GLM45.call,
        header="{name}",
        codec=replace(_PARAMETERS, open_end="</arg_key><arg_value>", between=""),
        first="",
        between="",
    ),
    result=Result("", "<tool_response>", "</tool_response>"),
    switches=Switches(always={"clear_thinking": False}),
)

GLM53 = replace(
    GLM47,
    name="glm53",
    models=("GLM-5.3",),
    switches=Switches(
        always={"clear_thinking": False},
        on={},
        off={"reasoning_effort": "low"},
        efforts=by_level("reasoning_effort", "low", "high", "max"),
    ),
)

LING3 = replace(
    GLM45,
    name="ling3",
    models=("Ling-3",),
    turns=Turns.framed(
        system="<role>SYSTEM</role>",
        user="<role>HUMAN</role>",
        assistant="<role>ASSISTANT</role>",
        tools="<role>OBSERVATION</role>",
        end="<|role_end|>",
    ),
    think=Think("<think>", "</think>", inner="", after=""),
    call=replace(GLM45.call, codec=replace(_PARAMETERS, between=""), tail="\n"),
)

HY3 = replace(
    GLM45,
    name="hy3",
    models=("Hy3",),
    turns=Turns(
        system=Pair("", ""),
        user=Pair("<｜hy_User{suffix}｜>", ""),
        assistant=Pair("<｜hy_Assistant{suffix}｜>", "<｜hy_eos{suffix}｜>"),
        tools=Pair("<tool_responses{suffix}>", "</tool_responses{suffix}>"),
    ),
    think=Think("<think{suffix}>", "</think{suffix}>", inner="", after=""),
    call=Call(
        "<tool_call{suffix}>",
        "</tool_call{suffix}>",
        Tagged(
            open="<arg_key{suffix}>",
            open_end="</arg_key{suffix}>\n<arg_value{suffix}>",
            close="</arg_value{suffix}>",
            trim="none",
        ),
        header="{name}<tool_sep{suffix}>\n",
        section=Pair("<tool_calls{suffix}>", "</tool_calls{suffix}>"),
        around="\n",
    ),
    result=Result("\n", "<tool_response{suffix}>", "</tool_response{suffix}>", inner="\n"),
    switches=Switches(
        always={"preserved_thinking": True},
        on={"reasoning_effort": "high"},
        off={"reasoning_effort": "no_think"},
        efforts=by_level("reasoning_effort", "low", "high"),
    ),
    suffix=r"<think(:[\w-]+)>",
)
