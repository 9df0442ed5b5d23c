"""The catalogue of corpora: a TOML file each, read through importlib.resources."""
