"""Learners that draw far away from the servers."""
