"""A checkpoint becomes a model for other programs, or a web page.

Its name is not ``export``, because `gpt.export` is a function.
"""
