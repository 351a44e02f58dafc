"""The former path of `memoire.prompts.pool`, for scripts that still name it."""

import importlib
import sys

sys.modules[__name__] = importlib.import_module("memoire.prompts.pool")
