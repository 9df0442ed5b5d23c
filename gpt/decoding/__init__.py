"""A model and a prompt become text, for one text or many.

Knows no files and no HTTP.
"""
