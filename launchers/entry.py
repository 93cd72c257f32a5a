"""What the script ``ft`` runs: an interruption is quiet from the first import on."""

from __future__ import annotations


def main() -> int:
    try:
        from launchers import cli  # takes a moment, in which Ctrl-C may come

        return cli.main()
    except KeyboardInterrupt:
        return 130
