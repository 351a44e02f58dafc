"""Network layer: worker threads, ZeroMQ sockets, connections, name look-ups and access control."""
