"""Command line of memoire: parsers of the commands, and their implementations."""
