"""The command line: words → config → one call → rendering. Imported as ``gpt_cli``."""
