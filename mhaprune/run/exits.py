"""How a command ends where it cannot go on: in one line and with an exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mhaprune.tables.manifest import shell_command


@contextmanager
def plain_exits(directory: Path | None = None) -> Iterator[None]:
    """Turn a user's mistake into one line and exit code 2, an interruption into 130.

    `directory` is that of the run, if there is one yet. With MHAPRUNE_TRACEBACK set, a mistake is
    raised as it is.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = shell_command(sys.argv, [f"resume={directory}"])
        resume = f"; go on with: {again}" if directory else ""
        print(f"interrupted; what was measured is kept{resume}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        from mhaprune.run.mistakes import MISTAKES, one_line

        if os.environ.get("MHAPRUNE_TRACEBACK") or not isinstance(error, MISTAKES):
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
