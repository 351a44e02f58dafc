"""Keyed rows: values by name."""
