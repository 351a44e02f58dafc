"""`python -m memoire` is the command `memoire`."""

import sys

from memoire.cli import main

sys.exit(main())
