"""A server started because none ran, and programs a harness leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launchers import background
from launchers.agents import leftovers
from launchers.agents.common import Launch
from launchers.running import ServerProblem

SERVE = """import sys, time
from pathlib import Path
Path(sys.argv[sys.argv.index("--ready-file") + 1]).write_text("{}")
time.sleep(60)
"""


def test_only_this_machine_gets_a_server(home: Path) -> None:
    with pytest.raises(ServerProblem, match="another machine's address"):
        background.start_server("http://box:8000", (), None)


def test_a_server_that_cannot_start_says_why(home: Path) -> None:
    with pytest.raises(ServerProblem, match=r"exit code 2; the end of its log .*1\.log:\n(.|\n)*--no-such-flag"):
        background.start_server("http://127.0.0.1:1", ("--no-such-flag",), None)
    assert "--no-such-flag" in (home / ".local/state/ft/server/1.log").read_text()


def test_the_server_goes_on_and_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    monkeypatch.setattr(background, "SERVE", (sys.executable, str(tmp_path / "serve.py")))
    background.start_server("http://127.0.0.1:4321", ("--model", "m"), None)
    pid = int(capsys.readouterr().err.split("kill ")[1])
    try:
        assert os.getsid(pid) == pid  # what ends the agent's terminal does not end it
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        assert argv[-3:-1] == ["--model", "m"] and "4321" in argv
    finally:
        os.kill(pid, signal.SIGKILL)


def sleeper(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "daemon"
    program.write_bytes(Path("/bin/sleep").resolve().read_bytes())
    program.chmod(0o755)
    return subprocess.Popen([program, "60"])


def launch(folder: Path, *command: str) -> Launch:
    return Launch(command, {"SOME_HOME": str(folder)}, (), leftovers=folder / "daemons")


def test_what_a_harness_leaves_running_is_stopped_and_nothing_else(tmp_path: Path) -> None:
    ours, others = sleeper(tmp_path / "mine" / "daemons"), sleeper(tmp_path / "other" / "daemons")
    try:
        code = leftovers.run_and_stop_leftovers(launch(tmp_path / "mine", "/bin/sh", "-c", "exit 7"), os.environ)
        assert code == 7
        assert ours.wait(10) == -signal.SIGTERM
        assert others.poll() is None
    finally:
        ours.kill()
        others.kill()


def test_they_stay_while_another_of_the_same_home_runs(tmp_path: Path) -> None:
    ours = sleeper(tmp_path / "mine" / "daemons")
    other = subprocess.Popen(["/bin/sleep", "60"], env={"SOME_HOME": str(tmp_path / "mine")})
    try:
        assert leftovers.run_and_stop_leftovers(launch(tmp_path / "mine", "/bin/true"), os.environ) == 0
        assert ours.poll() is None
    finally:
        ours.kill()
        other.kill()


def test_signals_reach_the_harness_and_its_end_is_told(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from launchers.agents.common import Launch; from launchers.agents.leftovers import run_and_stop_leftovers\n"
        "script = 'trap \"exit 9\" TERM; echo up; while :; do sleep 0.05; done'\n"
        f"launch = Launch(('/bin/sh', '-c', script), {{}}, (), leftovers=Path({str(tmp_path)!r}))\n"
        "sys.exit(run_and_stop_leftovers(launch, os.environ))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 9
