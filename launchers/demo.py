"""``ft demo``: a short chat with the embedded model, then a scripted agent session and what its requests reused."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def demo(flags: Sequence[str]) -> int:
    """Run it all, with these flags of ``ft serve``. 1 when something failed, or when more than a tenth of the work was
    done twice."""
    try:
        from launchers import demo_session
    except ModuleNotFoundError as error:
        remedy = "get it with: pip install 'ft-server[demo]'"
        print(f"ft demo: error: {error.name} is not installed; {remedy}", file=sys.stderr)
        return 1
    return demo_session.run(flags)
