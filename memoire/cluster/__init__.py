"""Nodes as programs: settings and launching a cluster on one machine."""
