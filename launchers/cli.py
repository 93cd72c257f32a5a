"""The command ``ft``. Free of torch: commands that need it are started as processes of their own."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from launchers import ctl, launch_cmd, serve_options
from launchers.agents.common import LaunchError
from launchers.agents.registry import HARNESSES
from launchers.running import DEFAULT_URL, ServerProblem, first_key
from sessions.store.words import why

Commands = argparse._SubParsersAction  # what add_subparsers returns; argparse has no public name for it
Handler = Callable[[argparse.Namespace, Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. What follows ``--`` belongs to the program that is launched."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, unknown = build_parser().parse_known_args(arguments[:cut])
    if unknown:
        refuse(options, unknown)
    handler: Handler = options.handler
    try:
        code = handler(options, arguments[cut + 1 :])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has had enough; Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LaunchError, ServerProblem) as error:
        print(f"{options.parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def refuse(options: argparse.Namespace, unknown: Sequence[str]) -> NoReturn:
    """Ends with the usage of the sub-command that was meant."""
    parser: argparse.ArgumentParser = options.parser
    problem = f"unrecognized arguments: {' '.join(unknown)}"
    if options.agent:
        hint = f"arguments of the agent itself go after --: {parser.prog} -- {' '.join(unknown)}"
        argparse.ArgumentParser.error(parser, f"{problem}; {hint}")
    name = unknown[0].partition("=")[0]
    if not name.startswith("-"):
        problem += f"; a model's folder is named with --model {name}" if options.handler is run_serve else ""
    else:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        problem += "".join(f"; did you mean {flag}?" for flag in difflib.get_close_matches(name, flags, 1))
    parser.error(problem)


def build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="ft",
        description="Serve coding agents from an open-weight MoE model on this machine.",
        epilog=examples("ft serve", "ft launch claude", "ft ctl stats", "ft demo"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_serve(commands)
    add_launch(commands)
    add_demo(commands)
    add_ctl(commands)
    add_sessions(commands)
    add_store(commands)
    add_families(commands)
    add_engine_command(
        commands,
        "checkpoint",
        "make checkpoints for tests and trials",
        {"tiny": "a tiny one with random weights"},
        ("ft checkpoint tiny qwen3_5_moe /tmp/tiny", "ft checkpoint tiny --help"),
    )
    add_bench(commands)
    return parser


class Parser(argparse.ArgumentParser):
    """Sub-commands are of the same class."""

    def error(self, message: str) -> NoReturn:
        super().error(f"{message} (see {self.prog} --help)")


class Version(argparse.Action):
    """Looks the version up only when asked; that is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"ft {importlib.metadata.version('ft-server')}")
        parser.exit()


def examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def add_command(
    commands: Commands[argparse.ArgumentParser], name: str, summary: str, *lines: str, more: str = ""
) -> argparse.ArgumentParser:
    description = " ".join(filter(None, (f"{summary[0].upper()}{summary[1:]}.", more)))
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples(*lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser, agent=False)
    return parser


# -- serve ------------------------------------------------------------------------------------------------------------


def add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    lines = (
        "ft serve",
        "ft serve --model ~/models/Qwen3-30B-A3B --kv-bytes 8g",
        "ft serve --model ~/models/Qwen3-30B-A3B --expert-format mxfp4 --gpu-bytes 12g",
        "ft serve --host 0.0.0.0 --api-key-file keys.txt",
        "ft serve --model ~/models/Qwen3-30B-A3B --engine http://gpu-box:30000",
    )
    parser = add_command(commands, "serve", "serve a model to coding agents", *lines)
    serve_options.add_options(parser)
    parser.usage = "%(prog)s [--model DIR] [--host ADDRESS] [--port PORT] [OPTION ...]"
    parser.set_defaults(handler=run_serve)


def run_serve(options: argparse.Namespace, _: Sequence[str]) -> int:
    try:
        settings = serve_options.settings(options)
    except ServerProblem as error:
        print(f"{options.parser.prog}: error: {error}", file=sys.stderr)
        return 2  # as for all settings that cannot be served
    from launchers.serve import serve  # the whole server: too slow to import for other commands

    return serve(settings)


# -- launch -----------------------------------------------------------------------------------------------------------


def add_launch(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "launch",
        "start a coding agent on the running server",
        *("ft launch", "ft launch claude", "ft launch codex --dry-run", 'ft launch pi -- -p "explain this repository"'),
        more="Without a name, lists the agents and says which are installed.",
    )
    parser.set_defaults(handler=launch_cmd.listing)
    agents = parser.add_subparsers(title="agents", metavar="AGENT")
    for harness in HARNESSES:
        more = launch_cmd.PASSED_ON.format(harness.title)
        agent = add_command(agents, harness.name, f"start {harness.title}", *launch_cmd.examples(harness), more=more)
        launch_cmd.add_options(agent, harness)
        add_server_options(agent)


# -- demo, ctl --------------------------------------------------------------------------------------------------------


def add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "demo",
        "run one scripted agent session and print what was computed twice",
        *("ft demo", "ft demo --device cpu", "ft demo --device cuda --experts hybrid"),
    )
    serve_options.add_gpu(parser)
    parser.set_defaults(handler=run_demo)


def run_demo(options: argparse.Namespace, _: Sequence[str]) -> int:
    from launchers.demo import demo  # it needs packages that only `pip install ft-server[demo]` brings

    return demo(serve_options.gpu_flags(options))


def add_ctl(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "ctl", "ask the running server how it is", "ft ctl health", "ft ctl stats --json")
    questions = parser.add_subparsers(title="questions", metavar="QUESTION", required=True)
    for name, summary, ask in (
        ("health", "can it take requests (exit code 0), or not (1)", ctl.health),
        ("stats", "memory used and its bounds, sessions, counters", ctl.stats),
    ):
        lines = (f"ft ctl {name}", f"ft ctl {name} --json --url http://127.0.0.1:9000")
        question = add_command(questions, name, summary, *lines)
        add_server_options(question, as_json="print the server's answer as JSON")
        question.set_defaults(handler=run_ctl, ask=ask)
    cache = add_command(
        questions, "cache", "how the engine's memory is divided, and divide it anew",
        "ft ctl cache", "ft ctl cache --kv 32k", "ft ctl cache --experts 2000 --kv 64k", "ft ctl cache --auto",
    )  # fmt: skip
    cache.add_argument("--experts", type=ctl.count, metavar="N", help="experts that the GPU holds")
    cache.add_argument("--kv", type=ctl.count, metavar="TOKENS", help="tokens whose keys and values are held")
    cache.add_argument("--states", type=ctl.count, metavar="N", help="checkpoints of recurrent states that are held")
    cache.add_argument(
        "--auto",
        action="store_true",
        help="let the engine decide again: on a GPU, how many experts and tokens it holds, by what saves most time",
    )
    add_server_options(cache, as_json="print the server's answer as JSON")
    cache.set_defaults(handler=run_ctl_cache)


def run_ctl_cache(options: argparse.Namespace, _: Sequence[str]) -> int:
    wanted = {name: getattr(options, name) for name in ("experts", "kv", "states", "auto")}
    return ctl.cache(options.url, first_key(options.api_key_file), wanted, as_json=options.json)


def run_ctl(options: argparse.Namespace, _: Sequence[str]) -> int:
    ask: Callable[..., int] = options.ask
    return ask(options.url, first_key(options.api_key_file), as_json=options.json)


def add_server_options(parser: argparse.ArgumentParser, as_json: str = "") -> None:
    """``as_json``: what ``--json`` does, where there is that flag."""
    parser.add_argument("--url", default=DEFAULT_URL, help="where the server is (default: %(default)s)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the API key the server wants")
    if as_json:
        parser.add_argument("--json", action="store_true", help=as_json)


# -- sessions, store --------------------------------------------------------------------------------------------------


def add_sessions(commands: Commands[argparse.ArgumentParser]) -> None:
    lines = ("ft sessions list", "ft sessions show 3fa2", "ft sessions export 3fa2 session.jsonl")
    parser = add_command(commands, "sessions", "what each conversation reused, and what is kept of it", *lines)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    act: Callable[[Any, argparse.Namespace], int]
    for name, summary, wants, act in (
        ("list", "all sessions, the most recent first", "", lambda all, _: all.list()),
        ("show", "its requests: what was reused, and why something was not", "id", lambda all, o: all.show(o.id)),
        (
            "export",
            "write one to a file, for a server of the same model",
            "id file",
            lambda all, o: all.export(o.id, o.file),
        ),
        ("import", "take one in", "file", lambda all, o: all.take_in(o.file)),
        ("pin", "keep one, whatever its age", "id", lambda all, o: all.pin(o.id)),
        ("unpin", "keep one no longer than others", "id", lambda all, o: all.unpin(o.id)),
        ("forget", "delete one, from memory and from disk", "id", lambda all, o: all.forget(o.id)),
    ):
        line = " ".join(["ft sessions", name, *("3fa2" if one == "id" else "session.jsonl" for one in wants.split())])
        action = add_command(actions, name, summary, line, f"{line} --url http://127.0.0.1:9000")
        if "id" in wants:
            action.add_argument("id", metavar="ID", help="a session's id, or the start of it")
        if "file" in wants:
            action.add_argument("file", type=Path, metavar="FILE", help="- for standard input or output")
        add_server_options(action, as_json="print JSON")
        action.set_defaults(handler=run_sessions, act=act)


def run_sessions(options: argparse.Namespace, _: Sequence[str]) -> int:
    from launchers.sessions_cmd import Sessions

    act: Callable[[Sessions, argparse.Namespace], int] = options.act
    return act(Sessions(options.url, first_key(options.api_key_file), options.json), options)


def add_store(commands: Commands[argparse.ArgumentParser]) -> None:
    lines = ("ft store stat", "ft store verify", "ft store forget --all")
    more = "A running server is asked to do it; else it is done on the directory."
    parser = add_command(commands, "store", "look after what is kept on disk", *lines, more=more)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    act: Callable[[Any], int]
    for name, summary, act in (
        ("stat", "how much is stored, by model", lambda store: store.stat()),
        ("verify", "read everything, and say what is damaged (exit code 1)", lambda store: store.verify()),
        ("rebuild", "make the index anew from what is stored; while no server runs", lambda store: store.rebuild()),
        ("gc", "free what is no longer worth keeping", lambda store: store.collect()),
        ("forget", "delete everything, with all sessions", lambda store: store.forget()),
    ):
        line = f"ft store {name}{' --all' if name == 'forget' else ''}"
        action = add_command(actions, name, summary, line, f"{line} --store /mnt/fast/ft")
        if name == "forget":
            action.add_argument("--all", action="store_true", required=True, help="everything is what you mean")
        action.add_argument(
            "--store", type=Path, metavar="DIR", default=serve_options.default_store(),
            help="folder of the store (default: %(default)s)",
        )  # fmt: skip
        action.add_argument("--store-key-file", type=Path, metavar="FILE", help="what an encrypted store was given")
        action.add_argument("--url", help=f"the server to ask, whatever its store (default: {DEFAULT_URL})")
        action.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the API key the server wants")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(handler=run_store, act=act)


def run_store(options: argparse.Namespace, _: Sequence[str]) -> int:
    from launchers.store_cmd import Store

    try:
        key = options.store_key_file.read_bytes() if options.store_key_file else None
    except OSError as error:
        raise ServerProblem(
            f"cannot read the store's key in {options.store_key_file} ({why(error)}): check --store-key-file"
        ) from error
    store = Store(options.store, key, options.url, first_key(options.api_key_file), options.json)
    act: Callable[[Store], int] = options.act
    return act(store)


# -- families ---------------------------------------------------------------------------------------------------------


def add_families(commands: Commands[argparse.ArgumentParser]) -> None:
    lines = ("ft families", "ft families --markdown", "ft families check ~/models/Qwen3-30B-A3B")
    parser = add_command(commands, "families", "how each model family writes thinking, calls and outputs", *lines)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(handler=run_families, directory=None)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    action = add_command(actions, "check", "which family a checkpoint is, and why it is no other", lines[-1])
    action.add_argument("directory", type=Path, metavar="DIR", help="folder with tokenizer and chat template")


def run_families(options: argparse.Namespace, _: Sequence[str]) -> int:
    from launchers import families_cmd  # reads every tokenizer library: too slow for other commands

    if options.directory is not None:
        return families_cmd.check(options.directory)
    if options.markdown:
        print(families_cmd.markdown(list(families_cmd.rows({}))), end="")
        return 0
    return families_cmd.show()


# -- commands of the engine -------------------------------------------------------------------------------------------


BENCHES = {
    "decode": ("one token at a time", "engine.bench decode"),
    "prefill": ("a long prompt", "engine.bench prefill"),
    "bw": ("memory, the CPU's experts and, with an NVIDIA GPU, the link to it", "engine.bench_bandwidth"),
    "offload": (
        "one token at a time on a GPU that does not hold the experts; needs an NVIDIA GPU",
        "engine.bench_offload",
    ),
    "store": ("look-up and restore, and what the store costs decoding", "engine.bench_store"),
    "replay": ("an agent trace against a server: what is computed twice", "launchers.bench_replay:replay"),
    "trace": ("make such a trace", "launchers.bench_replay:trace"),
    "parsers": (
        "what parsing calls, rendering and tokenizing cost, for each family",
        "launchers.bench_parsers:main",
    ),
    "grammar": ("what constrained decoding costs, for each family", "launchers.bench_grammar:main"),
    "api": ("what the server adds to a request, a token and an idle stream", "launchers.bench_api:main"),
}
"""What each measures, and what does it: a function of ours, or a module that runs as a process of its own."""


def add_bench(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_engine_command(
        commands,
        "bench",
        "measure the engine and its store against what this machine allows, and how often a token is computed",
        {name: text for name, (text, _) in BENCHES.items()},
        (
            "ft bench decode",
            "ft bench bw --quick",
            "ft bench replay",
            "ft bench parsers --family qwen3_xml",
            "ft bench api --help",
        ),
    )
    parser.set_defaults(handler=run_bench)


def run_bench(options: argparse.Namespace, _: Sequence[str]) -> int:
    program = BENCHES[options.what][1]
    module, _, function = program.partition(":")
    if function:
        command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        return command(options.arguments)
    module, *first = program.split()
    run_module(module, [*first, *options.arguments])


def add_engine_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    summary: str,
    choices: Mapping[str, str],
    lines: Sequence[str],
) -> argparse.ArgumentParser:
    """A command whose own arguments the engine's module of that name reads."""
    width = max(map(len, choices))
    listed = "\n".join(f"  {key:<{width}}  {text}" for key, text in choices.items())
    parser = add_command(commands, name, summary, *lines)
    parser.description = f"{parser.description}\n\nwhat:\n{listed}"
    parser.add_argument("what", metavar="WHAT", choices=tuple(choices), help="one of those above")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own; see --help after it")
    rest.required = False  # so that only WHAT is said to be missing
    parser.set_defaults(handler=run_engine_command, module=f"engine.{name}")
    return parser


def run_engine_command(options: argparse.Namespace, _: Sequence[str]) -> NoReturn:
    run_module(options.module, [options.what, *options.arguments])


def run_module(module: str, arguments: Sequence[str]) -> NoReturn:
    command = [sys.executable, "-P", "-m", module, *arguments]
    os.execv(sys.executable, command)  # noqa: S606 (no shell wanted)


if __name__ == "__main__":
    raise SystemExit(main())
