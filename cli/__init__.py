"""The command line: parses arguments into a config, calls the library, prints the result. Imported as ``gpt_cli``."""
