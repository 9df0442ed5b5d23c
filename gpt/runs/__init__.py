"""What stays on disk: runs, checkpoints, adapters, and the models of other programs.

Knows neither training nor decoding.
"""
