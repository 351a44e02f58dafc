"""Every text that memoire raises, logs or prints is in tests/messages.txt, where people read it."""

import messagekit

MAX_SILENT = 237
"""Places that no test reaches; the file has their source code instead of a recorded text."""


def test_the_file_has_each_place_and_no_other() -> None:
    places = {place.key for place in messagekit.places()}
    assert messagekit.read().keys() == places, "run: make messages"
    assert len(places) > 1000


def test_tests_reach_the_texts() -> None:
    assert len(messagekit.silent()) <= MAX_SILENT, messagekit.silent()


def test_numbers_ids_addresses_and_paths_are_masked() -> None:
    text = "client 0123456789abcdef at tcp://127.0.0.1:5560 wrote 1,234.5 s\n of /tmp/a.b/state.db"
    assert messagekit.masked(text) == "client ID at ADDRESS wrote N s of PATH"
