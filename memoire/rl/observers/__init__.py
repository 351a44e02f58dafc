"""Jobs that whoever has a free environment runs."""
