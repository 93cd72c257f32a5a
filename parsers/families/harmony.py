"""Channel formats: an assistant turn is several messages, and each message's header says what it is."""

from __future__ import annotations

from parsers.families.minimax import invokes
from parsers.format import Call, Format, Frames, Json, Pair, Result, Route, Switches, Turns, by_level

HARMONY = Format(
    name="harmony",
    models=("gpt-oss",),
    turns=Turns(
        system=Pair("<|start|>system<|message|>", "<|end|>"),
        user=Pair("<|start|>user<|message|>", "<|end|>"),
        assistant=Pair("<|start|>assistant", "<|return|>"),
        tools=Pair("<|start|>functions.", "<|end|>"),
        stops=("<|call|>", "<|endoftext|>"),
        others=("<|start|>developer<|message|>",),
    ),
    frames=Frames(
        start="<|start|>assistant",
        message="<|message|>",
        ends=("<|end|>", "<|call|>", "<|return|>"),
        routes=(
            Route(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)", "call"),
            Route(r"^(?:(?!<\|channel\|>).)*<\|channel\|>\s*analysis\b", "thinking"),
            Route(r"^\s*(?:<\|channel\|>|$)", "text"),
        ),
        thinking="<|channel|>analysis",
        text="<|channel|>final",
        call=" to=functions.{name}<|channel|>commentary json",
        call_end="<|call|>",
        tokens=("<|channel|>", "<|constrain|>"),
        preamble="<|channel|>commentary",
    ),
    call=Call("", "", Json(), between=""),
    result=Result("", "{name} to=assistant<|channel|>commentary<|message|>", ""),
    switches=Switches(
        on={},
        off={"reasoning_effort": "low"},
        efforts=by_level("reasoning_effort", "low", "medium", "high"),
    ),
)

MUSE = Format(
    name="muse_glimmer",
    models=("Muse-Glimmer",),
    turns=Turns.framed("<|start|>{}", "<|eot|>", "system<|message|> user<|message|> assistant", tools="<|start|>tool "),
    frames=Frames(
        start="<|start|>assistant",
        message="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        routes=(
            Route(r"^\s*to=self\b", "thinking"),
            Route(r"^\s*to=(?:user|commentary)\b", "text"),
            Route(r"^\s*to=(?P<name>\S+)", "call"),
            Route(r"^\s*$", "text"),
        ),
        thinking=" to=self",
        text=" to=user",
        call=" to={name}",
        call_end="<|eom|>",
    ),
    call=invokes("atem:", "atem:function_calls"),
    result=Result("", '{name}<|message|><tool_output name="{name}">', "</tool_output>", inner="\n"),
    switches=Switches(
        on={},
        off={"reasoning_strength": "low"},
        efforts=by_level("reasoning_strength", "low", "medium", "high"),
    ),
)
