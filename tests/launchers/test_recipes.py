"""The recipes as data: exact environment, command line and files of each harness."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from launchers.agents import aider, claude, codex, openclaw, opencode, qwen, toml
from launchers.agents.common import (
    Launch,
    LaunchError,
    PlannedFile,
    child_environment,
    cloud_variables,
    describe,
    exports,
    prepare,
    without_proxy,
)
from launchers.agents.harness import Harness, plan
from launchers.agents.registry import HARNESSES
from launchers.running import RunningServer

SERVER = RunningServer("http://127.0.0.1:8123", "local-moe", 65536)

CLAUDE = {
    "ANTHROPIC_BASE_URL": "http://127.0.0.1:8123",
    "ANTHROPIC_AUTH_TOKEN": "ft-local",
    "ANTHROPIC_API_KEY": "",
    "ANTHROPIC_MODEL": "local-moe",
    "ANTHROPIC_DEFAULT_OPUS_MODEL": "local-moe",
    "ANTHROPIC_DEFAULT_SONNET_MODEL": "local-moe",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "local-moe",
    "CLAUDE_CODE_SUBAGENT_MODEL": "local-moe",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "16384",
    "API_TIMEOUT_MS": "3000000",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",
    "API_FORCE_IDLE_TIMEOUT": "0",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_FEEDBACK_SURVEY": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "CLAUDE_CONFIG_DIR": "/state/ft/claude",
}

CODEX = {
    "model": "local-moe",
    "model_provider": "ft",
    "model_catalog_json": "/state/ft/codex/model_catalog.json",
    "model_auto_compact_token_limit": 52428,
    "web_search": "disabled",
    "model_providers": {
        "ft": {
            "name": "ft",
            "base_url": "http://127.0.0.1:8123/v1",
            "wire_api": "responses",
            "env_key": "FT_API_KEY",
            "stream_idle_timeout_ms": 3600000,
            "stream_max_retries": 2,
            "request_max_retries": 2,
            "supports_websockets": True,
        }
    },
    "features": {
        "goals": False,
        "plugins": False,
        "apps": False,
        "skill_search": False,
        "daemon_auto_start": False,
    },
    "skills": {"bundled": {"enabled": False}},
    "agents": {"enabled": False},
    "analytics": {"enabled": False},
}

ENVIRON = {"PATH": "/bin", "XDG_STATE_HOME": "/state"}


def file_of(launch: Launch, name: str) -> PlannedFile:
    return next(file for file in launch.files if file.path.name == name)


def test_claude_environment_and_command() -> None:
    launch = plan(claude.HARNESS, SERVER, ("-p", "say hi"), ENVIRON)
    assert launch.command == ("claude", "-p", "say hi")
    assert dict(launch.environment) == CLAUDE
    assert launch.files == (
        PlannedFile(Path("/state/ft/claude/.claude.json"), '{"hasCompletedOnboarding": true}\n', True),
    )
    assert launch.removed == () and launch.warnings == ()


def test_claude_with_a_home_of_the_users_writes_nothing() -> None:
    launch = plan(claude.HARNESS, SERVER, (), ENVIRON, home=Path("/home/me/.claude"), command=("/opt/claude",))
    assert launch.command == ("/opt/claude",) and launch.files == ()
    assert launch.environment["CLAUDE_CONFIG_DIR"] == "/home/me/.claude"


def test_claude_leaves_most_of_a_small_context_to_the_prompt() -> None:
    small = plan(claude.HARNESS, RunningServer("http://127.0.0.1:1", "m", 8192), (), ENVIRON)
    assert small.environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2048"
    assert small.environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "8192"
    assert "too short for Claude Code" in small.warnings[0] and "ft serve --model" in small.warnings[0]
    assert "8,192 tokens" in small.warnings[0]
    assert "ft launch claude --url http://127.0.0.1:1 -- --tools" in small.warnings[0]
    fewer = plan(claude.HARNESS, RunningServer("http://127.0.0.1:1", "m", 8192), ("--tools", "Bash"), ENVIRON)
    assert fewer.warnings == ()


def test_codex_files_environment_and_command() -> None:
    launch = plan(codex.HARNESS, SERVER, ("exec", "say hi"), ENVIRON)
    assert launch.command == ("codex", "exec", "say hi")
    assert dict(launch.environment) == {
        "CODEX_HOME": "/state/ft/codex",
        "FT_API_KEY": "ft-local",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    assert tomllib.loads(file_of(launch, "config.toml").text) == CODEX
    (entry,) = json.loads(file_of(launch, "model_catalog.json").text)["models"]
    assert (entry["slug"], entry["context_window"], entry["max_context_window"]) == ("local-moe", 65536, 65536)
    assert (entry["apply_patch_tool_type"], entry["shell_type"]) == ("freeform", "unified_exec")
    assert "*** Begin Patch" in entry["base_instructions"]


@pytest.mark.parametrize(
    ("efforts", "levels", "usual"),
    [
        (("none", "medium"), ["none", "medium"], "medium"),
        (("low", "medium", "high"), ["low", "medium", "high"], "medium"),
        (("none", "low", "high", "max"), ["none", "low", "high", "max"], "high"),
        (("none", "low"), ["none", "low"], "low"),
        ((), ["medium"], "medium"),
    ],
)
def test_codex_is_told_the_efforts_of_the_model(efforts: tuple[str, ...], levels: list[str], usual: str) -> None:
    (entry,) = codex.model_catalog(RunningServer("http://127.0.0.1:1", "m", 65536, efforts=efforts))["models"]
    assert [level["effort"] for level in entry["supported_reasoning_levels"]] == levels
    assert entry["default_reasoning_level"] == usual


def test_codex_with_a_home_of_the_users_writes_only_the_catalog() -> None:
    launch = plan(codex.HARNESS, SERVER, ("exec",), ENVIRON, home=Path("/home/me/.codex"))
    assert launch.environment["CODEX_HOME"] == "/home/me/.codex"
    assert [file.path for file in launch.files] == [Path("/state/ft/codex/model_catalog.json")]
    assert launch.command[0] == "codex" and launch.command[-1] == "exec"
    flags = launch.command[1:-1]
    assert set(flags[::2]) == {"-c"}
    assert tomllib.loads("\n".join(flags[1::2])) == CODEX


def test_codex_keeps_what_was_added_to_its_configuration(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    path = tmp_path / "ft" / "codex" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(
        'model = "old"\nnotify = ["a", "b\\"c"]\n[projects."/my \\"repo\\""]\ntrust_level = "trusted"\n'
        "[features]\ngoals = true\nother = true\n[[hooks.list]]\nname = 'x'\n[empty]\n"
    )
    written = tomllib.loads(file_of(plan(codex.HARNESS, SERVER, (), environ), "config.toml").text)
    assert written["model"] == "local-moe" and written["notify"] == ["a", 'b"c']
    assert written["projects"] == {'/my "repo"': {"trust_level": "trusted"}}
    assert written["features"] == {**CODEX["features"], "other": True}  # type: ignore[dict-item]
    assert written["hooks"] == {"list": [{"name": "x"}]} and written["empty"] == {}


def test_codex_with_a_broken_configuration_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "ft" / "codex" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("model = ")
    with pytest.raises(LaunchError, match=r"config\.toml .*delete it"):
        plan(codex.HARNESS, SERVER, (), {"XDG_STATE_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": -2.5, "c": True, "d": 'ü \u007f \\ " \n\t'},
        {"t": {"u": {"v": {}}}, "a b": {"c.d": [1, 2], "e": ["x", ["y"]]}},
        {"list": [{"x": 1, "y z": [{}]}], "after": {"k": False}},
    ],
)
def test_toml_reads_back(value: dict[str, Any]) -> None:
    assert tomllib.loads(toml.document(value)) == value


def test_cloud_variables_go_and_others_stay() -> None:
    inherited = {
        "PATH": "/bin",
        "ANTHROPIC_API_KEY": "sk",
        "ANTHROPIC_BEDROCK_BASE_URL": "x",
        "CLAUDE_CODE_USE_BEDROCK": "1",
        "CLAUDECODE": "1",
        "OPENAI_API_KEY": "sk",
        "OPENAI_BASE_URL": "x",
        "CODEX_HOME": "/mine",
        "AWS_PROFILE": "p",
        "GOOGLE_APPLICATION_CREDENTIALS": "f",
        "GEMINI_API_KEY": "k",
        "AZURE_OPENAI_API_KEY": "k",
        "CLOUD_ML_REGION": "r",
        "VERTEX_REGION_X": "r",
        "EDITOR": "vi",
        "AWSOME": "not a cloud",
    }
    removed = cloud_variables(inherited, keep=("AWS_PROFILE",))
    assert set(inherited) - set(removed) == {"PATH", "EDITOR", "AWSOME", "AWS_PROFILE"}
    child = child_environment(
        plan(claude.HARNESS, SERVER, (), {**inherited, **ENVIRON}, keep=("AWS_PROFILE",)), inherited
    )
    assert child == {"PATH": "/bin", "EDITOR": "vi", "AWSOME": "not a cloud", "AWS_PROFILE": "p", **CLAUDE}


def test_a_kept_variable_wins_over_the_recipe() -> None:
    environ = {**ENVIRON, "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "999"}
    launch = plan(claude.HARNESS, SERVER, (), environ, keep=("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "API_TIMEOUT_MS"))
    child = child_environment(launch, environ)
    assert child["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "999"
    assert child["API_TIMEOUT_MS"] == "3000000"  # was not set, so there is nothing to keep


def test_no_proxy_is_extended() -> None:
    assert without_proxy({"no_proxy": "corp.example"}, SERVER)["NO_PROXY"] == "corp.example,127.0.0.1,localhost"
    server = RunningServer("http://box:8000", "m", 1)
    assert without_proxy({"NO_PROXY": "localhost"}, server)["no_proxy"] == "localhost,127.0.0.1,box"


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_a_key_is_sent_but_never_shown(harness: Harness) -> None:
    """In the environment, or in a file of ft's own; the shell is told to read it from the user's file."""
    server = RunningServer("http://127.0.0.1:1", "m", 65536, api_key="secret-key")
    launch = plan(harness, server, (), ENVIRON)
    assert "secret-key" in launch.environment.values() or any("secret-key" in file.text for file in launch.files)
    assert "secret-key" not in describe(launch, {"AWS_SECRET_ACCESS_KEY": "aws-secret"})
    assert "secret-key" not in " ".join(launch.command)
    assert "secret-key" not in exports(launch, {}, Path("/keys"))


@pytest.mark.parametrize("in_file", [True, False])
def test_what_a_shell_is_told_sets_the_same_environment(in_file: bool, tmp_path: Path) -> None:
    keys = tmp_path / "my keys"
    keys.write_text("\n# mine\n me secret-key \nother key\n")
    server = RunningServer("http://127.0.0.1:1", "it's", 65536, api_key="secret-key")
    launch = plan(claude.HARNESS, server, ("-p", "two words"), {**ENVIRON, "AWS_REGION": "eu"})
    script = exports(launch, {"AWS_REGION": "eu"}, keys if in_file else None)
    inherited = {**ENVIRON, "PATH": os.environ["PATH"], "AWS_REGION": "eu", "FT_API_KEYS": "me secret-key,other"}
    done = subprocess.run(["/bin/sh", "-ec", f"{script}\nenv -0"], env=inherited, capture_output=True, text=True)
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert {name: found[name] for name in launch.environment} == dict(launch.environment)
    assert "AWS_REGION" not in found and script.endswith("# then run: claude -p 'two words'")


def test_the_command_shown_can_be_pasted() -> None:
    launch = plan(codex.HARNESS, SERVER, ("exec", "it's $HOME"), ENVIRON)
    (line,) = (line.removeprefix("run     ") for line in describe(launch, {}).splitlines() if line[:4] == "run ")
    shown = subprocess.run(["/bin/sh", "-c", line.replace("codex", "printf '%s|'", 1)], capture_output=True, text=True)
    assert shown.stdout == "exec|it's $HOME|"


def test_openclaw_works_in_the_project_and_leaves_no_files_of_its_own_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = json.loads(file_of(plan(openclaw.HARNESS, SERVER, (), ENVIRON), "openclaw.json").text)
    defaults = settings["agents"]["defaults"]
    assert (defaults["workspace"], defaults["skipBootstrap"]) == (str(tmp_path), True)


def test_opencode_shows_other_programs_what_the_user_configured(tmp_path: Path) -> None:
    """Its folder is found through a variable that they read too."""
    users, state = tmp_path / "config", tmp_path / "state"
    for name in ("git/config", "gh/hosts.yml", "opencode/opencode.json"):
        (users / name).parent.mkdir(parents=True, exist_ok=True)
        (users / name).write_text(name)
    environ = {"XDG_CONFIG_HOME": str(users), "XDG_STATE_HOME": str(state)}
    own = state / "ft" / "opencode"
    for _ in range(2):
        launch = plan(opencode.HARNESS, SERVER, (), environ)
        assert launch.environment["XDG_CONFIG_HOME"] == str(own)
        prepare(launch)
        assert (own / "git" / "config").read_text() == "git/config" and (own / "gh").is_symlink()
        settings = json.loads((own / "opencode" / "opencode.json").read_text())
        assert settings["model"] == "ft/local-moe" and settings["enabled_providers"] == ["ft"]
        assert settings["provider"]["ft"]["models"]["local-moe"]["limit"] == {"context": 65536, "output": 8192}
        assert (users / "opencode" / "opencode.json").read_text() == "opencode/opencode.json"
    (users / "gh" / "hosts.yml").unlink()
    (users / "gh").rmdir()
    prepare(plan(opencode.HARNESS, SERVER, (), environ))
    assert not (own / "gh").is_symlink()


def test_limits_of_the_server_reach_every_client_that_has_some() -> None:
    server = RunningServer("http://127.0.0.1:1", "m", 32768, max_output=3000)
    found = {}
    for harness in HARNESSES:
        launch = plan(harness, server, (), ENVIRON)
        told = " ".join((*launch.environment.values(), *(file.text for file in launch.files)))
        found[harness.name] = ("32768" in told, "3000" in told)
    assert found == {
        "claude": (True, True),
        "codex": (True, False),  # it asks for no length
        "opencode": (True, True),
        "openclaw": (True, True),
        "pi": (True, True),
        "qwen": (True, True),
        "aider": (True, True),
        "mini": (False, False),
    }


def test_aider_gets_the_address_where_a_projects_env_file_cannot_change_it() -> None:
    command = plan(aider.HARNESS, SERVER, ("--message", "x"), ENVIRON).command
    assert command[command.index("--openai-api-base") + 1] == "http://127.0.0.1:8123/v1"
    assert command[1:3] == ("--model", "openai/local-moe") and command[-2:] == ("--message", "x")


def test_settings_that_a_client_added_stay(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    path = tmp_path / "ft" / "qwen" / "settings.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"ui": {"theme": "mine"}, "model": {"name": "old", "other": 1}}')
    written = json.loads(file_of(plan(qwen.HARNESS, SERVER, (), environ), "settings.json").text)
    assert written["ui"] == {"theme": "mine"} and written["model"]["other"] == 1
    assert written["model"]["name"] == "local-moe"
    path.write_text("[]")
    with pytest.raises(LaunchError, match="delete it to start afresh"):
        plan(qwen.HARNESS, SERVER, (), environ)
