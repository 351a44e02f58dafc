"""`python -m memoire` is the command `memoire`."""

import sys

from memoire.cli.main import main

sys.exit(main())
