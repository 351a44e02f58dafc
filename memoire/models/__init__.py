"""Published models: versions, bodies, and who has which."""
