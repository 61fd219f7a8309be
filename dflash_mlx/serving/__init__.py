"""A pair for people and programs: the chat, the server, and the prefixes both keep."""
