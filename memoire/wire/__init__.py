"""Wire format: messages and containers as bytes. docs/wire.md describes both."""
