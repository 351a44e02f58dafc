"""Command line of memoire: one file for each group of commands."""
