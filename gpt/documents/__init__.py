"""A source (a file, a folder, an address, a corpus) becomes text and records.

Knows no tokens, no split and no conversations.
"""
