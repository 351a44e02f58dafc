"""The command `memoire`, with a fault planted where the environment names one: `python -m history.node server ...`."""

import os
import sys
from typing import Any

from memoire import cli

from .plants import plant


def main() -> int:
    plant()
    logfile = os.environ.get("HISTORY_LOGFILE")
    if logfile:
        from memoire.server import Server

        made = Server.__init__

        def with_logfile(self: Any, *arguments: Any, **options: Any) -> None:
            made(self, *arguments, **options)
            self.set_logfile(logfile)

        Server.__init__ = with_logfile  # type: ignore[method-assign]
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
