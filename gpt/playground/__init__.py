"""The web page in which a model writes, on a server or on its own."""
