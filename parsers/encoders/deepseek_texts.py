"""What DeepSeek's models are told in front of a conversation, word for word as they were trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from parsers.encoders.message import Message
from parsers.format import Call

V32 = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{section}>" block like the following as part of your reply to the user:
<{section}>
<{invoke} name="$FUNCTION_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
<{invoke} name="$FUNCTION_NAME2">
...
</{invoke}>
</{section}>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<{section}>
...
</{section}>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{tools}
</functions>
"""

V4 = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{section}>" \
block like the following:

<{section}>
<{invoke} name="$TOOL_NAME">
<{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{parameter}>
...
</{invoke}>
<{invoke} name="$TOOL_NAME2">
...
</{invoke}>
</{section}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{tools}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

EFFORTS_V4: Mapping[object, str] = {
    None: "",
    "low": "",
    "high": """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

""",
    "max": """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

""",
}
EFFORT_V41 = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
USUAL_EFFORT_V41 = 75


def declared(text: str, call: Call, tools: Sequence[Message]) -> str:
    """What stands behind the system text; nothing without tools."""
    if not tools:
        return ""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    section, invoke = call.section.open.strip("<>") if call.section else "", call.open.strip("<")
    parameter = invoke.replace("invoke", "parameter")
    return "\n\n" + text.format(section=section, invoke=invoke, parameter=parameter, tools=lines)
