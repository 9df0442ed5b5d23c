"""The corpus catalogue: one TOML file per corpus, read with importlib.resources."""
