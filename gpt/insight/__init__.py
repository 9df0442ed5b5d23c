"""Measures and explains: the loss of a text, attention, the logit lens, reports, copied passages.

Returns plain values; `cli.show` draws them.
"""
