"""Tables of prompts and their answers."""
