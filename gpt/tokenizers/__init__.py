"""Text becomes ids, and ids become text: finds, imports and saves tokenizers.

Knows nothing of where a text comes from or where ids go.
"""
