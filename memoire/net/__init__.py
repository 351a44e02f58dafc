"""Threads, sockets, connections, and names."""
