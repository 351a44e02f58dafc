"""Wire format: messages and containers as bytes. docs/development/wire.md describes both."""
