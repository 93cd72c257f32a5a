"""Finding a harness's program, the Node it needs, and installing it: only with consent, and for ft alone."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launchers.agents import claude, clients, codex, mini, pi
from launchers.agents.common import LaunchError
from launchers.agents.registry import HARNESSES

if TYPE_CHECKING:
    from conftest import FakeServer

ROOT = Path(__file__).resolve().parents[2]


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def node(folder: Path, version: str) -> Path:
    return script(folder / "node", f"#!/bin/sh\necho {version}\n")


def environ(folder: Path) -> dict[str, str]:
    return {"PATH": str(folder), "XDG_STATE_HOME": str(folder / "state")}


def ft(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{path}:/usr/bin:/bin"}
    command = [sys.executable, "-P", "-m", "launchers.cli", *arguments]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


def test_a_program_of_its_own_is_only_warned_about_under_an_old_node(tmp_path: Path) -> None:
    node(tmp_path, "v20.11.0")
    script(tmp_path / "claude", "#!/bin/sh\n")
    client = clients.find(claude.HARNESS, environ(tmp_path))
    assert client is not None and client.command == ("claude",)
    warning = clients.check_node(claude.HARNESS, client, environ(tmp_path))
    assert warning and "Node is 20" in warning and "npm install -g node@22" in warning and "2.1.332" in warning
    node(tmp_path, "v22.0.0")
    assert clients.check_node(claude.HARNESS, client, environ(tmp_path)) is None


def test_what_runs_in_node_is_refused_under_an_old_one(tmp_path: Path) -> None:
    node(tmp_path, "v18.1.0")
    script(tmp_path / "pi", "#!/usr/bin/env node\n")
    client = clients.find(pi.HARNESS, environ(tmp_path))
    assert client is not None
    with pytest.raises(LaunchError, match=r"Node 18 is too old, 20 is needed.*--install.*npm install -g node@20"):
        clients.check_node(pi.HARNESS, client, environ(tmp_path))
    (tmp_path / "node").unlink()
    with pytest.raises(LaunchError, match="Node was not found"):
        clients.check_node(pi.HARNESS, client, environ(tmp_path))


def test_an_installation_of_fts_own_comes_first_with_its_own_node(tmp_path: Path) -> None:
    node(tmp_path, "v18.1.0")
    script(tmp_path / "pi", "#!/usr/bin/env node\n")
    own = clients.own_folder(pi.HARNESS, environ(tmp_path)) / clients.NODE_BINARIES
    ours = script(own / "pi", "#!/usr/bin/env node\n")
    client = clients.find(pi.HARNESS, environ(tmp_path))
    assert client is not None and client.command == (str(ours),)
    own_node = node(own, "v24.0.0")
    client = clients.find(pi.HARNESS, environ(tmp_path))
    assert client is not None and client.command == (str(own_node), str(ours))
    assert clients.check_node(pi.HARNESS, client, environ(tmp_path)) is None
    named = clients.find(pi.HARNESS, environ(tmp_path), str(tmp_path / "pi"))
    assert named is not None and named.command == (str(tmp_path / "pi"),)


def test_what_is_missing_is_named_with_its_fix(tmp_path: Path) -> None:
    node(tmp_path, "v22.0.0")
    assert clients.find(claude.HARNESS, environ(tmp_path)) is None
    told = clients.how_to_install(claude.HARNESS, environ(tmp_path))
    assert told.endswith("with: npm install -g @anthropic-ai/claude-code@2.1.332") and "launch claude --install" in told
    node(tmp_path, "v18.1.0")
    told = clients.how_to_install(claude.HARNESS, environ(tmp_path))
    assert "Node 18 is too old" in told and "npm install -g node@22 && npm install -g @anthropic" in told
    assert "pipx install mini-swe-agent==" in clients.how_to_install(mini.HARNESS, environ(tmp_path))
    with pytest.raises(LaunchError, match="--program"):
        clients.find(claude.HARNESS, environ(tmp_path), "/no/such/program")


def test_the_node_is_installed_first_and_only_where_it_is_needed(tmp_path: Path) -> None:
    own = clients.own_folder(codex.HARNESS, environ(tmp_path))
    install = ("npm", "install", "--prefix", str(own), "--no-audit", "--no-fund")
    node(tmp_path, "v22.0.0")
    assert clients.install_commands(codex.HARNESS, environ(tmp_path)) == ((*install, "@openai/codex@0.169.0"),)
    (tmp_path / "node").unlink()
    first, second = clients.install_commands(codex.HARNESS, environ(tmp_path))
    assert first == (*install, "node@16")
    assert second == ("env", f"PATH={own / clients.NODE_BINARIES}:{tmp_path}", *install, "@openai/codex@0.169.0")
    assert "/state" not in clients.shown(second).split(":...")[1].replace(str(own), "")


def test_nothing_is_installed_without_consent(fake_server: FakeServer, home: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    script(tmp_path / "bin" / "npm", f"#!/bin/sh\necho called > {ran}\n")
    done = ft("launch", "opencode", "--url", fake_server.url, path=tmp_path / "bin")
    assert done.returncode == 1 and "opencode is not installed" in done.stderr and "opencode-ai@1.18.33" in done.stderr
    done = ft("launch", "opencode", "--url", fake_server.url, "--dry-run", "--install", path=tmp_path / "bin")
    assert done.returncode == 0 and "install npm install --prefix" in done.stdout
    assert not ran.exists() and not (home / ".local").exists()


def test_install_installs_and_goes_on(fake_server: FakeServer, home: Path, tmp_path: Path) -> None:
    installing = (
        '#!/bin/sh\n[ "$1 $2" = "install --prefix" ] || exit 9\nmkdir -p "$3/node_modules/.bin"\n'
        'printf "#!/bin/sh\\necho started \\$1\\n" > "$3/node_modules/.bin/opencode"\n'
        'chmod 755 "$3/node_modules/.bin/opencode"\n'
    )
    script(tmp_path / "bin" / "npm", installing)
    done = ft("launch", "opencode", "--url", fake_server.url, "--install", "--", "run", path=tmp_path / "bin")
    assert done.returncode == 0 and done.stdout == "started run\n", done.stderr
    assert (home / ".local/state/ft/clients/opencode/node_modules/.bin/opencode").exists()
    script(tmp_path / "bin" / "npm", "#!/bin/sh\nexit 3\n")
    done = ft("launch", "qwen", "--url", fake_server.url, "--install", path=tmp_path / "bin")
    assert done.returncode == 1 and "failed with exit code 3" in done.stderr


@pytest.mark.parametrize(("answer", "installs"), [("y", True), ("n", False), ("", False)])
def test_a_terminal_is_asked(answer: str, installs: bool, fake_server: FakeServer, home: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    script(tmp_path / "bin" / "npm", f"#!/bin/sh\necho called > {ran}\nexit 3\n")
    command = [sys.executable, "-P", "-m", "launchers.cli", "launch", "opencode", "--url", fake_server.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, f"{answer}\n".encode())
        assert child.wait(30) == 1
    os.close(ours)
    assert b"npm install --prefix" in shown and ran.exists() == installs


def test_the_list_says_what_is_installed(home: Path, tmp_path: Path) -> None:
    pi_program = script(tmp_path / "bin" / "pi", "#!/bin/sh\n")
    done = ft("launch", path=tmp_path / "bin")
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert [harness.name for harness in HARNESSES] == list(lines)[: len(HARNESSES)]
    assert lines["pi"].endswith(f"installed: {pi_program}") and "tested with 0.73.1" in lines["pi"]
    assert lines["qwen"].endswith("not installed")


def test_an_unknown_harness_lists_the_known_ones() -> None:
    done = ft("launch", "emacs", path=Path("/bin"))
    assert done.returncode == 2 and all(f"'{harness.name}'" in done.stderr for harness in HARNESSES)
