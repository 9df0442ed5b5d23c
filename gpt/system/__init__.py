"""The computer: files, signals, processes, other programs, and the errors that a user can cause.

Knows nothing of models, texts or options.
"""
