"""A terminal with one program in it: what it shows, as text, and the keys that are pressed."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

ENTER, ESCAPE, DOWN = "\r", "\x1b", "\x1b[B"
ROWS, COLUMNS = 50, 140
SHOWN_SECONDS = 240.0
POLL_SECONDS = 0.05
KEY_SECONDS = 0.5
"""Between keys: whoever types faster is taken to paste."""
RESTLESS_SECONDS = 4.0
_CONTROL = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[P_^][^\x1b]*\x1b\\|\x1b[()][0-9A-B]|\x1b."
)
_ANSWERS = {b"\x1b[6n": b"\x1b[1;1R", b"\x1b[c": b"\x1b[?62c", b"\x1b[?u": b"\x1b[?0u"}
"""To what a program asks its terminal: where the cursor is, what it is, which keys it tells apart."""


class Terminal:
    """Ends the program when it is left, if it has not ended."""

    def __init__(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._screen, inner = os.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        env = {**environment, "TERM": "xterm-256color"}
        self.child = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=inner, stdout=inner, stderr=inner, start_new_session=True
        )
        os.close(inner)
        self._shown = b""
        self._seen = 0
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.kill()
        self.child.wait()
        self._reader.join()
        os.close(self._screen)

    @property
    def text(self) -> str:
        """All that was shown since the last keys, with one space for every gap and every control sequence."""
        return " ".join(_CONTROL.sub(b" ", self._shown[self._seen :]).decode(errors="replace").split())

    def wait_for(self, text: str) -> None:
        """Programs draw only what changed, so a sentence may come in pieces: letters count, and gaps do not."""
        wanted = text.replace(" ", "")
        self.wait(lambda: wanted in self.text.replace(" ", ""), text)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SHOWN_SECONDS
        while not done():
            assert time.monotonic() < deadline, f"waited for {what!r}; shown: {self.text[-3000:]}"
            assert self.child.poll() is None, f"it ended; shown: {self.text[-3000:]}"
            time.sleep(POLL_SECONDS)

    def ended(self, seconds: float) -> int:
        """Its exit code."""
        code = self.child.wait(seconds)
        self._reader.join()
        return code

    def press(self, *keys: str) -> None:
        """When what is shown has come to rest, or does not; a program that still builds its screen forgets keys."""
        for _ in range(int(RESTLESS_SECONDS / KEY_SECONDS)):
            before = len(self._shown)
            time.sleep(KEY_SECONDS)
            if len(self._shown) == before:
                break
        self._seen = len(self._shown)
        for key in keys:
            os.write(self._screen, key.encode())
            time.sleep(KEY_SECONDS)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._screen, 1 << 16)
            except OSError:  # the program has ended
                return
            self._shown += data
            for question, answer in _ANSWERS.items():
                os.write(self._screen, answer * data.count(question))
