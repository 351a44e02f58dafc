"""Sides of contest.py, programs that learn a task in environments of their own; evaluation and page of their runs."""
