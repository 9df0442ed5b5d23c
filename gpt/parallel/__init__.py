"""Several processes that work as one: their start, their collectives, and a model in shards."""
