"""Imported before all else: says so where the compiled core is missing, as it does in a checkout that was never built.

Python itself would speak of a circular import.
"""

from importlib.util import find_spec
from pathlib import Path

from .errors import NotBuilt

if find_spec("memoire._core") is None:
    raise NotBuilt(str(Path(__file__).resolve().parent))
