"""A proxy between clients and servers."""
