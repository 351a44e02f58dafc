"""What is asked of nodes, and what it adds up to."""
