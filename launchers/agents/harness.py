"""A harness as data: what it is, where it comes from, what it needs. Each has a file of its own beside this one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launchers.agents.common import (
    LOCAL_KEY,
    Launch,
    PlannedFile,
    PlannedLinks,
    cloud_variables,
    state_directory,
    without_proxy,
)
from launchers.running import DEFAULT_URL, RunningServer


@dataclass(frozen=True)
class Ask:
    """What a recipe is made from. ``own`` is ft's folder for this harness; ``home`` is a configuration folder of the
    user's to use in its place, in which nothing may be written."""

    server: RunningServer
    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    own: Path
    home: Path | None

    @property
    def key(self) -> str:
        return self.server.api_key or LOCAL_KEY

    @property
    def base(self) -> str:
        """Where OpenAI clients go."""
        return f"{self.server.url}/v1"


@dataclass(frozen=True)
class Recipe:
    """``flags`` come before the user's own arguments."""

    environment: Mapping[str, str]
    flags: tuple[str, ...] = ()
    files: tuple[PlannedFile, ...] = ()
    links: tuple[PlannedLinks, ...] = ()
    leftovers: Path | None = None


@dataclass(frozen=True)
class Package:
    """``version`` is the one tested. ``node``: the Node major it needs, 0 for any."""

    registry: Literal["npm", "pip"]
    name: str
    version: str
    node: int = 0

    @property
    def requirement(self) -> str:
        return f"{self.name}{'@' if self.registry == 'npm' else '=='}{self.version}"


@dataclass(frozen=True)
class Harness:
    """``name`` is what ``ft launch`` calls it. ``home`` says what ``--home`` takes, empty where the recipe has no use
    for one. ``first_request``: about how many tokens its own text takes before the first word of the user; ``lean``:
    arguments under which it takes far fewer. ``example``: arguments that give it something to do."""

    name: str
    title: str
    program: str
    package: Package
    recipe: Callable[[Ask], Recipe]
    first_request: int
    example: str
    home: str = ""
    lean: str = ""


def plan(
    harness: Harness,
    server: RunningServer,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    command: Sequence[str] = (),
    home: Path | None = None,
    keep: Collection[str] = (),
) -> Launch:
    """How to start ``harness``, by ``command`` where it is another than its program's name. Variables in ``keep`` stay
    as they are. Reads, and touches nothing.

    Raises LaunchError where ft's own configuration cannot be read.
    """
    own = state_directory(environ) / harness.name
    recipe = harness.recipe(Ask(server, tuple(arguments), environ, own, home))
    environment = {**recipe.environment, **without_proxy(environ, server)}
    return Launch(
        command=(*(command or (harness.program,)), *recipe.flags, *arguments),
        environment={name: value for name, value in environment.items() if name not in keep or name not in environ},
        removed=cloud_variables(environ, keep),
        files=recipe.files,
        links=recipe.links,
        warnings=warnings(harness, server, arguments),
        secrets=(server.api_key,) if server.api_key else (),
        leftovers=recipe.leftovers,
    )


def warnings(harness: Harness, server: RunningServer, arguments: Sequence[str]) -> tuple[str, ...]:
    lean = harness.lean.split()
    if server.context_length >= 2 * harness.first_request or (lean and lean[0] in arguments):
        return ()
    url = "" if server.url == DEFAULT_URL else f" --url {server.url}"
    fewer = f", or use fewer tools: ft launch {harness.name}{url} -- {harness.lean}" if lean else ""
    return (
        f"the server's context of {server.context_length:,} tokens is too short for {harness.title}, whose first "
        f"request takes about {harness.first_request:,}: serve a model with a longer one (ft serve --model DIR){fewer}",
    )
