"""The command `memoire`."""
