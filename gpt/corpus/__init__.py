"""Text becomes token folders, and token folders become batches.

Knows no model.
"""
