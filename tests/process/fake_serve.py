"""``serve()`` as a process, over the fake worker. The argument is ServeSettings as JSON."""

from __future__ import annotations

import sys

from launchers.serve import serve
from launchers.settings import ServeSettings
from tests.process.support import FAKE_WORKER

if __name__ == "__main__":
    sys.exit(serve(ServeSettings.model_validate_json(sys.argv[1]), FAKE_WORKER))
