"""What the model says in a test, for any harness: one small piece of work, told in that harness's tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.drivers import Driver

GREET = """import sys


def greet(name: str) -> str:
    return f"Hello, {name}!"


if __name__ == "__main__":
    print(greet(sys.argv[1]))
"""
TEST = """from greet import greet


def test_greet():
    assert greet("you") == "Hello, you!"
"""
FIRST_LINE = '    return f"Hello, {name}"'
LAST_LINE = '    return f"Hello, {name}!"'
MANY = 'from greet import greet; [print(greet(f"reader-{n}")) for n in range(1, 401)]'
GREETINGS = f"python3 -c '{MANY}' | tee greetings.txt"
SUMMARY = "<state_snapshot>\ngreet.py greets a name and has a test in test_greet.py.\n</state_snapshot>"

BUILD, BUILT = "Build a greeting tool", "The greeting tool works."
ADD, ADDED = "Add a test", "The test is in test_greet.py."
ASK, ANSWERED = "What is left", "Nothing is left to do."
LONG = "Tell a long story"
BREAK, MENDED = "Make every mistake", "After three mistakes the file is there."
DELEGATE, DELEGATED = "Ask somebody to count", "They counted three."
COUNT, COUNTED = "Count to three and say so", "One, two, three."

Rule = dict[str, Any]


def script(driver: Driver, project: Path) -> str:
    """JSONL for ``ft serve --script``."""
    return "".join(f"{json.dumps(rule)}\n" for rule in rules(driver, project))


def rules(driver: Driver, project: Path) -> Iterator[Rule]:
    shell, write, edit, finish = driver.tools.shell, driver.tools.write, driver.tools.edit, driver.finish
    greet, test = str(project / "greet.py"), str(project / "test_greet.py")
    if not driver.loops:
        # What to write into the history of the repository: this request quotes the conversation.
        yield {"when": {"after_user": "(?m)^diff --git "}, "say": [{"text": "Work on the greeting tool"}]}
        yield from said(BUILD, [write(greet, GREET), {"text": BUILT}])
        yield from said(ADD, [write(test, TEST), {"text": ADDED}])
        return
    yield {"when": {"kind": "side"}, "say": [{"text": '{"title": "Greeting tool"}'}]}
    yield {"when": {"kind": "compaction"}, "say": [{"thinking": "What was done?"}, {"text": SUMMARY}]}
    yield from said(
        BUILD,
        [{"thinking": "First see what is here."}, {"text": "I will look around."}, shell("ls -a && git log --oneline")],
        [{"thinking": "An empty repository. Write the tool."}, write(greet, GREET.replace(LAST_LINE, FIRST_LINE))],
        [{"thinking": "It should sound glad."}, edit(greet, FIRST_LINE, LAST_LINE)],
        [{"thinking": "Does it fail without a name?"}, shell("python3 greet.py")],
        [{"text": "It fails without a name, as it should. Now many names."}, shell(GREETINGS)],
        [{"thinking": "All done."}, *finish(BUILT)],
    )
    yield from said(ADD, [{"thinking": "A test beside it."}, write(test, TEST)], finish(ADDED))
    yield from said(ASK, finish(ANSWERED))
    yield from said(LONG, [{"thinking": "How does it begin?"}, {"text": "Once upon a time. " * 4000}])
    yield from said(
        BREAK,
        [{"text": "I will use a tool that is not there."}, {"tool_call": {"name": "teleport", "args": {"to": "home"}}}],
        [{"thinking": "Then this one, without what it needs."}, without_arguments(shell("true"))],
        *(
            [[{"text": "Now one that breaks off."}, broken_off(shell("echo broken"))]]
            if driver.bears_broken_calls
            else []
        ),
        [{"text": "Now the right one."}, write(test, TEST)],
        finish(MENDED),
    )
    # Qwen Code has another agent look through a long conversation for what to remember.
    yield from said("Managed memory has TWO directories", finish("There is nothing to remember."))
    # openclaw has what is worth remembering written down before it compacts.
    yield from said("Pre-compaction memory flush", finish("NO_REPLY"))
    # After a compaction within its work, whichever that was, it shows the model the files it used last; opencode tells
    # it to go on.
    yield {"when": {"after_user": "^Recently accessed file"}, "say": finish(f"{BUILT} {ADDED}")}
    yield from said("Continue if you have next steps", finish(BUILT))
    # mini-swe-agent says as a user what was wrong with a call.
    yield from said("Tool call error", [{"text": "Now the right one."}, write(test, TEST)], finish(MENDED))
    if driver.agent is not None:
        call = [{"text": "Somebody else will."}, driver.agent(COUNT)]
        # Where the other one works beside the conversation, there is a second answer when it is done.
        yield from said(DELEGATE, call, finish(DELEGATED), finish(DELEGATED))
        yield from said(COUNT, finish(COUNTED))
        yield from said("<task-notification>", finish(DELEGATED))


def without_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_call": {"name": call["tool_call"]["name"], "args": {}}}


def broken_off(call: dict[str, Any]) -> dict[str, str]:
    """In the tiny checkpoint's own format: the answer ends within the last argument."""
    name, arguments = call["tool_call"]["name"], call["tool_call"]["args"]
    parameter = next(name for name, value in arguments.items() if value == "echo broken")
    return {"raw": f"<tool_call>\n<function={name}>\n<parameter={parameter}>\necho broken"}


def said(prompt: str, *answers: Sequence[dict[str, Any]]) -> Iterator[Rule]:
    """After ``prompt``, which a harness may have put behind a time or between quotation marks."""
    for step, say in enumerate(answers):
        yield {"when": {"after_user": rf'(^|\] |\n|: )"?{prompt}', "step": step}, "say": list(say)}
