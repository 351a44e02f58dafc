"""Which release this is, and what a node calls itself when it says HELLO or WELCOME."""

VERSION = "0.1.0"
SOFTWARE = f"memoire {VERSION}"
