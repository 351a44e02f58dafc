"""An actor's end of the wire."""
