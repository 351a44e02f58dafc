"""Handlers of the server's messages, one file for each subject. Pure; called with the dispatcher's lock held."""
