"""A run: a config and a text become checkpoints.

Its `recipe` decides, its `loop` trains.
"""
