"""The bytes of messages and of containers. docs/wire.md describes them."""
