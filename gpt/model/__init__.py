"""The decoder: ids become logits, and logits become a loss.

Knows no text, files or training runs.
"""
