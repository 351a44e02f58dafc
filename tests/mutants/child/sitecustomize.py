"""Recording in each Python process that a recorded test starts."""

import os

_test = os.environ.get("PYTEST_CURRENT_TEST", "")
if _test and os.environ.get("MEMOIRE_RECORD"):
    import calls

    calls.record_child(_test.rpartition(" (")[0])
