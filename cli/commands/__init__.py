"""One file for each command: words become a config, one call into `gpt`, and its result is shown."""
