"""The command `memoire`, with a fault planted where the environment names one: `python -m history.node server ...`."""

import sys

from memoire.cli import main

from .plants import plant

if __name__ == "__main__":
    plant()
    sys.exit(main.main())
