"""Recording in each Python process that a test starts: of called functions, or of the texts of memoire."""

import os

_test = os.environ.get("PYTEST_CURRENT_TEST", "")
if _test and os.environ.get("MEMOIRE_RECORD"):
    import calls

    calls.record_child(_test.rpartition(" (")[0])

if os.environ.get("MEMOIRE_MESSAGES"):
    import messagekit

    messagekit.install()
