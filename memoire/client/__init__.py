"""Actor side of the protocol: the client, its session with a server, and its pushes."""
