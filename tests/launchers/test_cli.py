"""The command ``ft`` as a process: help, errors, launching, and what it must not touch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launchers import entry, serve_options
from launchers.agents.harness import Harness
from launchers.agents.registry import HARNESSES
from launchers.cli import build_parser, main
from launchers.running import DEFAULT_URL, ServerProblem
from launchers.settings import ServeSettings

if TYPE_CHECKING:
    from conftest import FakeServer

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    [],
    ["serve"],
    ["launch"],
    *(["launch", harness.name] for harness in HARNESSES),
    ["demo"],
    ["ctl"],
    ["ctl", "health"],
    ["ctl", "stats"],
    ["sessions"],
    *(["sessions", action] for action in ("list", "show", "export", "import", "pin", "unpin", "forget")),
    ["store"],
    *(["store", action] for action in ("stat", "verify", "rebuild", "gc", "forget")),
    ["families"],
    ["families", "check"],
    ["checkpoint"],
    ["bench"],
]


def ft(*arguments: str, path: Path | None = None, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ft; ``path`` replaces PATH, ``first`` comes first on the module path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(part) for part in (first, ROOT) if part)}
    if path:
        environment["PATH"] = str(path)
    command = [sys.executable, "-P", "-m", "launchers.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable} -S\n{script}")
    (folder / name).chmod(0o755)
    return folder


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = sorted(path for path in folder.rglob("*"))
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in found}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        build_parser().parse_args([*command, "--help"])
    examples = capsys.readouterr().out.partition("examples:")[2]
    assert end.value.code == 0 and "\n  " + " ".join(["ft", *command]) in examples


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("engine.bench", ["decode"]),
        ("engine.bench", ["prefill"]),
        ("engine.bench_store", []),
        ("engine.bench_bandwidth", []),
        ("engine.bench_offload", []),
        ("engine.checkpoint", ["tiny"]),
        ("launchers.cli", ["bench", "replay"]),
        ("launchers.cli", ["bench", "trace"]),
        ("launchers.cli", ["bench", "parsers"]),
        ("launchers.cli", ["bench", "grammar"]),
        ("launchers.cli", ["bench", "api"]),
    ],
    ids=str,
)
def test_every_bench_says_what_its_flags_mean(module: str, arguments: list[str]) -> None:
    command = [sys.executable, "-P", "-m", module, *arguments, "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "\n  ft " in done.stdout.partition("examples:")[2]
    lines = done.stdout.partition("options:")[2].partition("\n\n")[0].splitlines()
    for line, following in pairwise([*lines, ""]):  # a long name has its text on the next line
        if line.startswith("  -"):
            assert "  " in line.strip() or following.startswith(" " * 8), line


def test_what_is_missing_or_wrong_names_the_help() -> None:
    for arguments in ([], ["sessions"], ["store", "forget"], ["bench", "api?"]):
        done = ft(*arguments)
        assert done.returncode == 2 and " --help)" in done.stderr


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    for name in ("torch", "triton", "transformers", "numpy", "uvicorn"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')\n")
    done = ft("--help", first=tmp_path)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    done = ft("--version")
    assert done.stdout == f"ft {version}\n", done.stderr


def test_no_command_is_a_usage_error() -> None:
    done = ft()
    assert done.returncode == 2 and "COMMAND" in done.stderr


# -- serve ------------------------------------------------------------------------------------------------------------


def settings(*arguments: str) -> ServeSettings:
    return serve_options.settings(build_parser().parse_args(["serve", *arguments]))


def test_serve_without_flags_keeps_every_default(home: Path) -> None:
    assert settings() == ServeSettings(store=home / ".local/state/ft/store")
    assert settings("--no-store") == ServeSettings()
    assert f"http://{ServeSettings().host}:{ServeSettings().port}" == DEFAULT_URL


def test_serve_flags_become_settings(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n two three \n\n")
    line = (
        f"--model m --model-name n --family hermes --context-length 4096 --max-output-tokens 9 --script s --host ::1 "
        f"--port 0 --api-key-file {tmp_path / 'keys'} --ready-file r --cache c --runtime-dir d --kv-bytes 1.5g "
        "--checkpoint-bytes 512MiB --max-sequences 3 --max-sessions 4 --queue 5 --dtype float32 --kernels reference "
        "--instruction-set scalar --threads 2 --chunk-tokens 128 --store s --store-quota 1t --store-daily-writes 5g "
        "--store-key-file k --host-cache 1m --no-idle-prefill --share-cache --key-running 6 --key-waiting 7 "
        "--allowed-host a --allowed-host b --max-body 8m --tls-cert t --tls-key u --device auto --experts hybrid "
        "--expert-format mxfp4 --gpu-bytes 12g --split 0.25 --attention torch,triton"
    )
    assert settings(*line.split()) == ServeSettings(
        model=Path("m"),
        model_name="n",
        family="hermes",
        context_length=4096,
        max_output_tokens=9,
        script=Path("s"),
        host="::1",
        port=0,
        api_keys=("one", {"secret": "three", "name": "two"}),
        api_key_file=tmp_path / "keys",
        share_cache=True,
        key_running=6,
        key_waiting=7,
        allowed_hosts=("a", "b"),
        max_body=8 << 20,
        tls_cert=Path("t"),
        tls_key=Path("u"),
        ready_file=Path("r"),
        cache=Path("c"),
        runtime_dir=Path("d"),
        kv_bytes=3 << 29,
        checkpoint_bytes=512 << 20,
        max_sequences=3,
        max_sessions=4,
        queue=5,
        dtype="float32",
        kernels="reference",
        instruction_set="scalar",
        threads=2,
        chunk_tokens=128,
        device="auto",
        experts="hybrid",
        expert_format="mxfp4",
        gpu_bytes=12 << 30,
        split=0.25,
        attention=("torch", "triton"),
        store=Path("s"),
        store_quota=1 << 40,
        store_daily_writes=5 << 30,
        store_key_file=Path("k"),
        host_cache=1 << 20,
        idle_prefill=False,
    )


@pytest.mark.parametrize("text", ["", "g", "0", "-1g", "x", "nan", "1e999", "1p"])
def test_sizes_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings(f"--kv-bytes={text}")
    assert "is not a size" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["2", "-0.1", "nan", "inf", "half", ""])
def test_shares_that_are_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings(f"--split={text}")
    assert "is no share: write auto, or a number from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--device cpu --experts hybrid --gpu-bytes 12g", r"^--experts, --gpu-bytes: .*or --device cpu"),
        ("--device cpu --attention torch,triton", r"^--attention: .*or --device cpu"),
        ("--device cpu --split 0", r"^--split: .*or --device cpu"),
        ("--device auto --split 0.5", r"^--split 0.5: .*--experts hybrid"),
        ("--device cuda --experts offload --split 0.5", r"^--split 0.5: .*--experts hybrid"),
        ("--device cuda --kernels reference", r"^--kernels reference: .*--device cuda"),
        ("--device cpu --attention torch,auto", r"^--attention: .*or --device cpu"),
        ("--device cuda --attention torch", r"^--attention: Input should be 'auto' or 'triton'"),
    ],
)
def test_what_does_not_go_together_is_refused_in_flags(line: str, says: str) -> None:
    with pytest.raises(ServerProblem, match=says):
        settings(*line.split())


@pytest.mark.parametrize("line", ["--experts auto", "--device auto --experts cpu", "--engine http://x --experts cpu"])
def test_what_goes_together_or_is_told_elsewhere(line: str) -> None:
    settings(*line.split())


def test_the_demo_passes_on_what_a_gpu_is_to_do() -> None:
    line = "--device cuda --experts hybrid --expert-format int8 --gpu-bytes 2g --split auto --attention torch,triton"
    flags = serve_options.gpu_flags(build_parser().parse_args(["demo", *line.split()]))
    assert settings(*flags) == settings(*line.split()) != settings()
    with pytest.raises(ServerProblem, match="--device cpu"):
        serve_options.gpu_flags(build_parser().parse_args(["demo", "--device", "cpu", "--experts", "hybrid"]))


def test_wrong_values_name_their_flags(tmp_path: Path) -> None:
    with pytest.raises(ServerProblem, match=r"--port: .*65535; --threads: .*ft serve --help"):
        settings("--port", "70000", "--threads", "-1")
    assert settings("--split", "auto").split is None
    with pytest.raises(ServerProblem, match=r"cannot read API keys .*--api-key-file"):
        settings("--api-key-file", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ServerProblem, match="holds no API key"):
        settings("--api-key-file", str(tmp_path / "empty"))


# -- launch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [harness.program for harness in HARNESSES])
def test_dry_run_shows_everything_and_touches_nothing(
    agent: str, fake_server: FakeServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "sk-mine")
    monkeypatch.chdir(home)
    ran = tmp_path / "ran"
    folder = program(tmp_path / "bin", agent, f"open({str(ran)!r}, 'w')\n")
    before = snapshot(home)
    done = ft("launch", agent, "--url", fake_server.url, "--dry-run", "--", "-p", "two words", path=folder)
    assert done.returncode == 0, done.stderr
    assert snapshot(home) == before and not ran.exists()
    (run,) = (line for line in done.stdout.splitlines() if line.startswith("run "))
    assert run.startswith(f"run     {agent}") and run.endswith("-p 'two words'")
    assert "remove  AWS_PROFILE" in done.stdout and "sk-mine" not in done.stdout
    assert "65536" in done.stdout or agent == "mini"  # it has no use for the context's length
    assert fake_server.url in done.stdout and f"{home}/.local/state/ft/{agent}" in done.stdout


def test_dry_run_works_without_the_client(fake_server: FakeServer, home: Path, tmp_path: Path) -> None:
    done = ft("launch", "codex", "--url", fake_server.url, "--dry-run", path=tmp_path)
    assert done.returncode == 0 and "(codex is not installed; ft launch codex --install would do that)" in done.stdout
    done = ft("launch", "codex", "--url", fake_server.url, path=tmp_path)
    assert done.returncode == 1 and "npm install -g @openai/codex@0.169.0" in done.stderr
    assert not (home / ".local").exists()


USERS = (
    ".claude/settings.json",
    ".claude.json",
    ".codex/config.toml",
    ".config/opencode/opencode.json",
    ".openclaw/openclaw.json",
    ".pi/agent/settings.json",
    ".qwen/settings.json",
    ".aider.conf.yml",
    ".config/mini-swe-agent/.env",
)
"""What these clients keep in a home that is not theirs now."""


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_launch_gives_the_child_its_environment_and_leaves_what_is_the_users(
    harness: Harness,
    fake_server: FakeServer,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Byte for byte, and so does ``--config``; the exit code is the client's."""
    monkeypatch.setenv("MISTRAL_API_KEY", "sk-mine")
    monkeypatch.setenv("AWS_REGION", "eu")
    monkeypatch.chdir(home)
    for name in USERS:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b'{"theirs": \r\n 1}')
    script = (
        "import os, sys\n"
        "print(sys.argv[-3:], [name for name in os.environ if name.startswith(('MISTRAL', 'AWS'))])\n"
        f"print({fake_server.url!r} in ' '.join([*sys.argv, *os.environ.values(), *map(read, files())]))\n"
        "sys.exit(7)\n"
    )
    helpers = (
        "import pathlib\n"
        f"files = lambda: [one for one in pathlib.Path({str(home / '.local')!r}).rglob('*') if one.is_file()]\n"
        "read = pathlib.Path.read_text\n"
    )
    folder = program(tmp_path / "bin", harness.program, helpers + script)
    users = snapshot(home)
    assert main(["launch", harness.name, "--url", fake_server.url, "--config"]) == 0
    assert "unset MISTRAL_API_KEY" in capsys.readouterr().out
    done = ft("launch", harness.name, "--url", fake_server.url, "--", "exec", "--", "x", path=folder)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "['exec', '--', 'x'] []\nTrue\n"
    after = snapshot(home)
    assert {path: after.get(path) for path in users} == users
    own = home / ".local" / "state" / "ft" / harness.name
    files = [path for path in own.rglob("*") if path.is_file() and not path.is_symlink()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_a_signal_reaches_the_client(fake_server: FakeServer, home: Path, tmp_path: Path) -> None:
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))\n"
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    folder = program(tmp_path / "bin", "claude", script)
    command = [sys.executable, "-P", "-m", "launchers.cli", "launch", "claude", "--url", fake_server.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(folder)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 42
    assert (home / ".local/state/ft/claude/.claude.json").exists()


def test_claudes_own_state_is_kept(fake_server: FakeServer, home: Path, tmp_path: Path) -> None:
    folder = program(tmp_path / "bin", "claude", "")
    state = home / ".local/state/ft/claude/.claude.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"theirs": 1}')
    done = ft("launch", "claude", "--url", fake_server.url, path=folder)
    assert done.returncode == 0 and state.read_text() == '{"theirs": 1}'


@pytest.mark.parametrize("arguments", [("launch", "claude"), ("launch", "codex"), ("ctl", "health")])
def test_no_server_names_ft_serve(arguments: tuple[str, ...], home: Path) -> None:
    done = ft(*arguments, "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    told = f"ft {' '.join(arguments)}: error: no server answers at http://127.0.0.1:1 (Connection refused): "
    assert done.stderr.startswith(told) and "`ft serve`" in done.stderr
    assert not (home / ".local").exists()


def test_a_dry_run_needs_no_server(home: Path) -> None:
    done = ft("launch", "claude", "--dry-run", "--url", "http://127.0.0.1:1")
    assert done.returncode == 0 and "CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072" in done.stdout
    assert "no server answers" in done.stderr and not (home / ".local").exists()


MISSING: list[list[str]] = [
    ["serve", "--api-key-file", "{gone}"],
    ["serve", "--script", "{gone}", "--no-store", "--runtime-dir", "{folder}"],
    ["serve", "--store-key-file", "{gone}", "--runtime-dir", "{folder}"],
    ["ctl", "stats", "--api-key-file", "{gone}"],
    ["store", "stat", "--store-key-file", "{gone}"],
    ["sessions", "import", "{gone}"],
    ["bench", "replay", "{gone}"],
    ["bench", "trace", "--out", "{gone}/trace.jsonl"],
    ["bench", "store", "--directory", "{gone}"],
]


@pytest.mark.parametrize("command", MISSING, ids=" ".join)
def test_a_file_that_is_not_there_is_named_once_and_without_numbers(command: list[str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    done = ft(*(part.format(gone=gone, folder=tmp_path) for part in command))
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr + done.stdout
    told = (done.stderr + done.stdout).splitlines()[-1]
    assert told.count(str(gone)) == 1 and "Errno" not in told, told


def test_settings_that_cannot_be_served_have_one_exit_code() -> None:
    for arguments in (["--port", "70000"], ["--engine", "http://127.0.0.1:1"]):
        done = ft("serve", *arguments)
        assert done.returncode == 2 and done.stderr.startswith("ft serve: error: --"), done.stderr


def test_what_belongs_to_the_agent_is_told_apart() -> None:
    done = ft("launch", "claude", "-p", "hi")
    assert done.returncode == 2 and done.stderr.endswith("go after --: ft launch claude -- -p hi\n")
    done = ft("serve", "--modle", "x")
    assert done.returncode == 2 and "usage: ft serve" in done.stderr and "--modle" in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("serve /models/one", "named with --model /models/one"),
        ("serve --modle /models/one", "did you mean --model?"),
        ("serve --kv-byte=8g", "did you mean --kv-bytes?"),
        ("ctl stats --jsno", "did you mean --json?"),
        ("store verify --nothing-like-it", "unrecognized arguments: --nothing-like-it (see ft store verify --help)"),
    ],
)
def test_what_was_meant_is_named(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(line.split())
    assert says in capsys.readouterr().err


def test_an_interruption_while_modules_are_loaded_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launchers.cli.main", interrupted)
    assert entry.main() == 130


class Everything(dict[str, tuple[int, Any]]):
    """One answer to whatever is asked."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def get(self, path: str, _: Any = None) -> tuple[int, Any]:
        return 200, self._body


@pytest.mark.parametrize("body", [b"<html>", [], None, {}, {"data": 3}, {"data": [{}]}])
def test_what_is_not_ft_is_told_from_it(fake_server: FakeServer, tmp_path: Path, body: Any) -> None:
    """As another program on the usual port is, which answers whatever it is asked."""
    fake_server.answers = Everything(body)
    (tmp_path / "session").write_text("{}")
    commands = ["sessions list", "sessions show x", "sessions pin x", f"sessions import {tmp_path}/session"]
    for command in [*commands, *(["ctl stats", "ctl cache"] if not isinstance(body, dict) else [])]:
        with pytest.raises(ServerProblem, match="name the right address"):
            run(command, fake_server.url)


def run(command: str, url: str) -> None:
    options = build_parser().parse_args([*command.split(), "--url", url])
    options.handler(options, [])


def test_a_reader_that_stops_reading_is_no_error() -> None:
    command = f"{sys.executable} -P -m launchers.cli --help | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


# -- commands of the engine -------------------------------------------------------------------------------------------


def test_engine_commands_become_the_engines_module(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: became.append(command))
    main(["bench", "decode", "--batch", "4", "--help"])
    main(["checkpoint", "tiny", "qwen3_5_moe", "out", "--seed", "1"])
    python = [sys.executable, "-P", "-m"]
    assert became == [
        [*python, "engine.bench", "decode", "--batch", "4", "--help"],
        [*python, "engine.checkpoint", "tiny", "qwen3_5_moe", "out", "--seed", "1"],
    ]


def test_an_unknown_engine_command_lists_the_known_ones() -> None:
    wrong = ft("bench", "encode")
    assert wrong.returncode == 2 and "decode" in wrong.stderr and "prefill" in wrong.stderr
