"""Nodes as programs: settings, pages, metrics, and a cluster on one machine."""
