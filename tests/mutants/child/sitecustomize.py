"""Loaded by each Python that a test starts while tests are recorded."""

import os

_test = os.environ.get("PYTEST_CURRENT_TEST", "")
if _test and os.environ.get("MEMOIRE_RECORD"):
    import calls

    calls.record_child(_test.rpartition(" (")[0])
