"""``ft launch``: a coding agent on the running server."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launchers.agents import clients
from launchers.agents.common import Launch, LaunchError, become, describe, exports, prepare
from launchers.agents.harness import Harness, plan
from launchers.agents.leftovers import run_and_stop_leftovers
from launchers.agents.registry import HARNESSES
from launchers.background import start_server
from launchers.running import RunningServer, ServerProblem, find_server, first_key

ASSUMED_CONTEXT = 131_072
PASSED_ON = "Arguments after `--` go to {} as they are."


def examples(harness: Harness) -> tuple[str, ...]:
    name = harness.name
    return (
        f"ft launch {name}",
        f"ft launch {name} -- {harness.example}",
        f"ft launch {name} --dry-run",
        f'eval "$(ft launch {name} --config)"',
    )


def add_options(parser: argparse.ArgumentParser, harness: Harness) -> None:
    parser.set_defaults(agent=True, handler=run, harness=harness)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="show what would be done, and touch nothing")
    what.add_argument(
        "--config",
        action="store_true",
        help="write ft's files for the agent and print its environment for the shell, but start nothing",
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="install the agent first if it is not there: the tested version, into a folder of ft's own",
    )
    parser.add_argument(
        "--start",
        nargs="?",
        const="",
        metavar="FLAGS",
        help='start a server if none runs at --url, with these flags of `ft serve`: --start="--model DIR"',
    )
    parser.add_argument(
        "--program", default="", metavar="FILE", help=f"the client to run (default: {harness.program}, from PATH)"
    )
    if harness.home:
        parser.add_argument(
            "--home", type=Path, metavar="DIR", help=f"your own {harness.home}; default: a directory of ft's"
        )
    parser.add_argument(
        "--keep-env",
        action="append",
        default=[],
        metavar="NAME",
        help="leave this variable as it is, where ft would set or remove it (may be repeated)",
    )


def listing(_: argparse.Namespace, __: Sequence[str]) -> int:
    """Every harness, and whether it is here."""
    rows = []
    for harness in HARNESSES:
        found = clients.find(harness, os.environ)
        state = f"installed: {found.path}" if found else "not installed"
        rows.append((harness.name, harness.title, f"tested with {harness.package.version}", state))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    for row in rows:
        print("  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])))
    print("\nft launch NAME starts one; ft launch NAME --install installs it first.")
    return 0


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    environ, harness = dict(os.environ), options.harness
    starts = not (options.dry_run or options.config)
    client = clients.find(harness, environ, options.program)
    running = server_for(options) if options.start is None else None
    if client is None and starts:
        client = installed_now(harness, environ, wanted=options.install)
    server = running or server_for(options)  # no server is started for an agent that is not there
    home: Path | None = getattr(options, "home", None)
    launch = plan(
        harness,
        server,
        arguments,
        environ,
        command=client.command if client else (),
        home=home and home.absolute(),
        keep=options.keep_env,
    )
    old_node = clients.check_node(harness, client, environ) if client and starts else None
    warn((*launch.warnings, *filter(None, (old_node,))))
    if options.dry_run:
        return show(launch, harness, client, environ, install=options.install)
    if options.config:
        return write_configuration(launch, environ, options.api_key_file)
    return carry_out(launch, environ)


def installed_now(harness: Harness, environ: Mapping[str, str], *, wanted: bool) -> clients.Client:
    """Installs only with the user's consent. Raises LaunchError."""
    if not wanted and not consents(harness, environ):
        raise LaunchError(clients.how_to_install(harness, environ))
    clients.install(harness, environ)
    client = clients.find(harness, environ)
    if client is None:
        raise LaunchError(
            f"{harness.package.requirement} was installed into {clients.own_folder(harness, environ)}, "
            f"but holds no {harness.program}: delete that folder and try again"
        )
    return client


def consents(harness: Harness, environ: Mapping[str, str]) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    commands = "\n".join(f"  {clients.shown(command)}" for command in clients.install_commands(harness, environ))
    print(f"{harness.title} is not installed. This would install it for ft alone:\n{commands}", file=sys.stderr)
    print("Install it now? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def server_for(options: argparse.Namespace) -> RunningServer:
    """The running server, started if asked for; a dry run can do without. Raises ServerProblem."""
    key = first_key(options.api_key_file)
    try:
        return find_server(options.url, key)
    except ServerProblem as problem:
        if options.dry_run:
            print(f"warning: {problem}. Shown as for one with {ASSUMED_CONTEXT:,} tokens of context", file=sys.stderr)
            return RunningServer(options.url.rstrip("/"), "local-moe", ASSUMED_CONTEXT, key)
        if options.start is None:
            raise
    start_server(options.url, shlex.split(options.start), options.api_key_file)
    return find_server(options.url, key)


def show(
    launch: Launch, harness: Harness, client: clients.Client | None, environ: Mapping[str, str], *, install: bool
) -> int:
    print(describe(launch, environ))
    if client is None:
        remedy = "" if install else f"; ft launch {harness.name} --install would do that"
        print(f"        ({harness.program} is not installed{remedy})")
        if install:
            commands = clients.install_commands(harness, environ)
            print("\n".join(f"install {clients.shown(command)}" for command in commands))
    return 0


def write_configuration(launch: Launch, environ: Mapping[str, str], api_key_file: Path | None) -> int:
    for path in prepare(launch):
        print(f"# wrote {path}")
    print(exports(launch, environ, api_key_file))
    return 0


def carry_out(launch: Launch, environ: Mapping[str, str]) -> int:
    prepare(launch)
    if launch.leftovers:
        return run_and_stop_leftovers(launch, environ)
    become(launch, environ)
    return 0  # never reached: this process is the harness now


def warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
