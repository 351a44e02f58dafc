"""Tables of whole episodes, of which a server draws samples."""
