"""Proxy between many clients and several servers: routing, model cache and sockets."""
