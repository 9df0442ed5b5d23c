"""``python -m gpt_cli``: the command, for what starts modules, as torchrun does."""

from .main import run

if __name__ == "__main__":
    run()
