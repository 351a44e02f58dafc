"""The sides of contest.py: programs that learn a task, each in its own environment; and what is made of their runs."""
