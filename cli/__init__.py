"""The command line: arguments → config → one library call → output. Imported as ``gpt_cli``."""
