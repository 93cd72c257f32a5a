"""``ft bench parsers``: what parsing, rendering and tokenizing cost per family, in processor time. Free of torch."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import track

from launchers.bench import chosen_formats, failed, make_tiny, table, verdict
from parsers.conversation import Conversation, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.events import Event, ToolArgsDelta, ToolCallEnd
from parsers.families.registry import FORMATS
from parsers.format import Format
from parsers.guard import Guard, visible
from parsers.load import FamilyError, load_family
from parsers.ranks import byte_level
from parsers.stream import StreamParser
from parsers.tokens import Tokenizer
from parsers.wire import Wire
from parsers.write import assistant_text

MAX_STEP_US = 50.0
MAX_GROWTH = 15.0
MAX_SCAN_US = 1.0
"""Goals: a step at p99; ten times the call over the call; for each token of a prompt that only has one new message."""
PIECE = 4
"""Characters of a token where tokens are fed."""
SUFFIX = ":bench"
ARCHITECTURES = ("qwen3_5_moe", "qwen3_moe")
TOOL = Tool(
    "write_file",
    "Writes a file.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "mode": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "content": {"type": "string"},
        },
    },
)
_CONTROL = re.compile(r"<\|[^<>|]*\|?>|<[^<>|]*\|>|<｜[^<>]*?｜>|｜DSML｜|\]<\]minimax\[>\[|\[/?[A-Z_]+\]")
_TAG = re.compile(r"</?[\w:]+>")
_CODE = (
    'def step_{n}(state: dict[str, int], name="größe"):\n    if state["n"] < {n}:\n        return [name, "{n}\\t"]\n\n'
)


@dataclass(frozen=True)
class ParseRow:
    """Microseconds per step of one call fed in two ways, and what ten times the call costs over it."""

    family: str
    characters_p50: float
    characters_p99: float
    tokens_p50: float
    tokens_p99: float
    growth: float
    whole_ms: float
    json_loads_ms: float

    @property
    def missed(self) -> bool:
        return max(self.characters_p99, self.tokens_p99) > MAX_STEP_US or self.growth > MAX_GROWTH


@dataclass(frozen=True)
class PromptRow:
    """Processor seconds to render and tokenize a conversation from scratch, and with one new message."""

    family: str
    what: str
    tokens: int
    scratch: float
    new_message: float

    @property
    def missed(self) -> bool:
        return self.new_message * 1e6 > MAX_SCAN_US * self.tokens


# ── parsing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Machine:
    """A format over a vocabulary of our own: bytes or short pieces, and its control tokens."""

    def __init__(self, wire_format: Format, text: str, piece: int) -> None:
        control = _control(wire_format)
        pieces = {text[at : at + piece].encode() for at in range(0, len(text), piece)} if piece > 1 else set()
        ranks = {bytes([byte]): byte for byte in range(256)}
        ranks |= {piece: 256 + n for n, piece in enumerate(sorted(pieces - ranks.keys()))}
        added = [(name, len(ranks) + n, special) for n, (name, special) in enumerate(control.items())]
        self.tokenizer = Tokenizer(byte_level(ranks, rf"[\s\S]{{1,{piece}}}", added))
        self.guard = Guard(self.tokenizer.control)
        self._format = wire_format
        self._wire = Wire.resolve(wire_format, self.tokenizer)

    def parser(self) -> StreamParser:
        return StreamParser(self._format, self._wire, self.tokenizer, (TOOL,), thinking_open=False)


def _control(wire_format: Format) -> dict[str, bool]:
    """Control tokens that the format's checkpoints probably have; True: special."""
    call, think = wire_format.call, wire_format.think
    pairs = [pair for pair in (think, call, call.section) if pair is not None]
    tags = [text for pair in pairs for text in (pair.open, pair.close) if _TAG.fullmatch(text)]
    found = [token for text in wire_format.generated() for token in _CONTROL.findall(text)]
    return dict.fromkeys(tags, False) | dict.fromkeys((*found, *wire_format.ends), True)


def call_of(size: int) -> ToolCall:
    """A call with about that many bytes of arguments, as agents write files."""
    content = "".join(islice((_CODE.format(n=n) for n in range(size)), size // len(_CODE)))
    arguments = {"path": "src/deep/module.py", "mode": 420, "tags": ["a", "b"], "content": content}
    return ToolCall("call00001", TOOL.name, json.dumps(arguments, ensure_ascii=False))


def bench_parse(wire_format: Format, size: int) -> ParseRow:
    """Raises ValueError when the call does not come back."""
    wire_format = wire_format.with_suffix(SUFFIX)
    call = call_of(size)
    small, large = (_turn(wire_format, one) for one in (call, call_of(10 * size)))
    characters = Machine(wire_format, "", 1)
    pieces = Machine(wire_format, visible(large), PIECE)
    by_character = sorted(_feed(characters, small, call))
    by_token = sorted(_feed(pieces, small, call))
    tenfold = _feed(pieces, large, call_of(10 * size))
    loads = _seconds(lambda: json.loads(call.arguments), 5)
    return ParseRow(
        wire_format.name,
        characters_p50=_quantile(by_character, 0.5),
        characters_p99=_quantile(by_character, 0.99),
        tokens_p50=_quantile(by_token, 0.5),
        tokens_p99=_quantile(by_token, 0.99),
        growth=sum(tenfold) / sum(by_token),
        whole_ms=sum(by_token) / 1000,
        json_loads_ms=loads * 1000,
    )


def _turn(wire_format: Format, call: ToolCall) -> str:
    guard = Guard(_control(wire_format))
    end = "" if wire_format.frames else wire_format.ends[0]
    return assistant_text(wire_format, guard, (Text("I write it."), call), "closed") + end


def _feed(machine: Machine, text: str, call: ToolCall) -> list[float]:
    """Microseconds of each step."""
    ids = machine.tokenizer.encode_trusted(text)
    parser = machine.parser()
    events: list[Event] = []
    steps: list[float] = []
    for token in ids:
        before = time.thread_time_ns()
        found = parser.feed(token)
        steps.append((time.thread_time_ns() - before) / 1000)
        events += found
    events += parser.finish("stop")
    arguments = "".join(event.fragment for event in events if isinstance(event, ToolArgsDelta))
    ends = [event.complete for event in events if isinstance(event, ToolCallEnd)]
    if ends != [True] or json.loads(arguments) != json.loads(call.arguments):
        raise ValueError("the call does not come back as it was written")
    return steps


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def _seconds(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        before = time.thread_time()
        work()
        taken.append(time.thread_time() - before)
    return median(taken)


# ── prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def bench_prompts(directory: Path, tokens: int) -> list[PromptRow]:
    """Raises FamilyError."""
    family = load_family(directory)
    rows = []
    for what, first, grown in (
        ("agent session", _session(tokens), _session(tokens, "Now the next one, please.")),
        ("one long message", _long(tokens), _long(tokens, "And one more sentence.")),
    ):
        count = len(family.render(first).ids)
        before = time.process_time()
        prompt = family.render(grown)
        between = time.process_time()
        scratch = family.render(grown, prefix_ok=False)
        rows.append(PromptRow(family.name, what, count, time.process_time() - between, between - before))
        if prompt.ids != scratch.ids:
            raise ValueError("a prompt with remembered pieces is not the one from scratch")
    return rows


def _session(tokens: int, query: str = "") -> Conversation:
    """Reads and writes of files; a step is about 850 tokens."""
    turns = [Turn("system", (Text("You work on files. " * 200),)), Turn("user", (Text("Clean this project up."),))]
    for step in range(max(1, tokens // 850)):
        call = ToolCall(f"call{step:05}", TOOL.name, call_of(800).arguments.replace("step_", f"step_{step}_"))
        turns.append(Turn("assistant", (Thinking(f"File {step} is next."), Text(f"I look at file {step}."), call)))
        turns.append(Turn("tool", (ToolOutput(call.id, _words(300, step)),)))
    if query:
        turns += (Turn("assistant", (Text("Done."),)), Turn("user", (Text(query),)))
    return Conversation(tuple(turns), (TOOL,))


def _long(tokens: int, more: str = "") -> Conversation:
    return Conversation((Turn("user", (Text(_words(tokens, 0) + more),)),), ())


def _words(count: int, seed: int) -> str:
    words = (
        "file",
        "the",
        "of",
        "value",
        "returns",
        "état",
        "in",
        "a",
        "list",
        "with",
        "42",
        "path/to",
        "x = 1;",
        "\n",
    )
    return " ".join(words[(seed + n * n) % len(words)] for n in range(count))


# ── command ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str]) -> int:
    """1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="ft bench parsers",
        description="Measure what parsing a call, and rendering and tokenizing a long prompt cost.",
        epilog="examples:\n  ft bench parsers --family qwen3_xml --tokens 0\n"
        "  ft bench parsers --family qwen3_xml --family kimi_k2 --model ~/models/Qwen3.6-35B-A3B",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--family", action="append", metavar="NAME", help="parse only its calls; may be repeated (default: all)"
    )
    parser.add_argument(
        "--model",
        action="append",
        type=Path,
        metavar="DIR",
        help="checkpoint for prompts; may be repeated (default: two tiny ones)",
    )
    parser.add_argument("--size", type=int, default=60_000, metavar="BYTES", help="of a call (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=100_000, help="of a prompt, about; 0: none (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    chosen = chosen_formats(parser, options.family)
    console = Console(highlight=False, stderr=options.json)
    try:
        parsed = [bench_parse(known, options.size) for known in track(chosen, "calls", console=console, transient=True)]
        prompts = _prompts(console, options)
    except (FamilyError, ValueError, subprocess.SubprocessError) as error:
        return failed(console, "bench parsers", error)
    missed = [row.family for row in parsed if row.missed] + [
        f"{row.family}, {row.what}" for row in prompts if row.missed
    ]
    if options.json:
        rows = {"parse": [asdict(row) for row in parsed], "prompts": [asdict(row) for row in prompts]}
        print(json.dumps({**rows, "missed": missed}, indent=2))
    else:
        show(console, options.size, parsed, prompts)
    return 1 if missed else 0


def _prompts(console: Console, options: argparse.Namespace) -> list[PromptRow]:
    if not options.tokens:
        return []
    with TemporaryDirectory(prefix="ft-parsers-") as scratch, console.status("making checkpoints") as status:
        tiny = ("--hidden", "32", "--tied")
        models = options.model or [make_tiny(Path(scratch) / a, *tiny, architecture=a) for a in ARCHITECTURES]
        rows = []
        for model in models:
            status.update(f"prompts of {model}")
            rows += bench_prompts(model, options.tokens)
        return rows


def show(console: Console, size: int, parsed: Sequence[ParseRow], prompts: Sequence[PromptRow]) -> None:
    columns = ("1 char p50", "p99", f"{PIECE} chars p50", "p99", "10x", "whole", "json.loads", "")
    width = max(len(known.name) for known in FORMATS)
    shown = table(f"a call of {size:,} bytes, us per step", *columns, first_width=width)
    for row in parsed:
        steps = (row.characters_p50, row.characters_p99, row.tokens_p50, row.tokens_p99)
        cells = (*(f"{step:.1f}" for step in steps), f"{row.growth:.1f}x", f"{row.whole_ms:.1f} ms")
        shown.add_row(row.family, *cells, f"{row.json_loads_ms:.2f} ms", verdict(row.missed))
    console.print(shown, f"goals: p99 at most {MAX_STEP_US:.0f} us, 10 times the call at most {MAX_GROWTH:.0f}x\n")
    if prompts:
        headings = ("", "tokens", "from scratch", "one new message", "")
        shown = table("prompts: rendered and tokenized", *headings, first_width=width)
        for one in prompts:
            cells = (f"{one.tokens:,}", f"{one.scratch * 1000:.0f} ms", f"{one.new_message * 1000:.1f} ms")
            shown.add_row(one.family, one.what, *cells, verdict(one.missed))
        console.print(shown, f"goal: with one new message at most {MAX_SCAN_US:.0f} us for each token of the prompt")
