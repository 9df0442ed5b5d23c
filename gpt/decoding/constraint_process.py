"""Compiles a grammar from stdin, for a vocabulary of bytes.

`gpt.decoding.constraint` first runs this program on a grammar that can be hostile: llguidance recurses until the stack
overflows, for example along a chain of ``$ref``, and has no time limit. A crash ends only this process. The program
imports nothing from gpt.
"""

import contextlib
import sys
import threading
from types import SimpleNamespace

from llguidance import LLMatcher, LLTokenizer

STACK = 2**20  # Bytes. gpt's threads have more, so they survive each grammar that this program survives.
MEMORY = 2**30  # Bytes.


def compile_grammar() -> None:
    """Compiles the grammar and computes its first mask."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"end"]
    vocabulary = SimpleNamespace(
        is_tokenizer_wrapper=True, tokens=tokens, special_token_ids=[256], eos_token_id=256, bos_token_id=None
    )
    tokenizer = LLTokenizer(vocabulary)  # type: ignore[arg-type, unused-ignore]
    LLMatcher(tokenizer, sys.stdin.read(), log_level=0).compute_bitmask()


if __name__ == "__main__":
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(ValueError, OSError):  # macOS does not support this limit.
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.stack_size(STACK)
    thread = threading.Thread(target=compile_grammar)
    thread.start()
    thread.join()
