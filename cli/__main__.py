"""Runs ``gpt`` as ``python -m gpt_cli``, for launchers such as torchrun."""

from .main import run

if __name__ == "__main__":
    run()
