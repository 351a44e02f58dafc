"""How figures of many nodes become one, and what is told as an event."""
