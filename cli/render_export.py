"""Printing the end of ``gpt export``."""

import shlex
from typing import TYPE_CHECKING

from gpt.words import counted

from .render import fact

if TYPE_CHECKING:
    from gpt.exporting.run import Exported


def exported(done: "Exported") -> None:
    """Prints what was written, what it costs in loss, and commands to try next."""
    place = shlex.quote(str(done.out))
    what = f"{done.bytes:,} bytes, {counted(done.tensors, 'tensor')}, {done.type}"
    fact("saved", f"{done.out}  ({what})")
    if done.loss_before is not None and done.loss_after is not None:
        change = done.loss_after - done.loss_before
        said = f"{done.loss_before:.4f} before, {done.loss_after:.4f} after: {change:+.4f} nats a token"
        fact("loss", said)
    if done.format == "gguf":
        line = f"FROM {done.out.absolute()}"
        more = [
            f"llama-cli -m {place}" + ("" if done.chat else ' -p "Once upon"'),
            f"ollama create NAME -f Modelfile  (a file with the line: {line})",
        ]
    else:
        how = "-i" if done.chat else '"Once upon"'
        more = [f"gpt sample {how} -m {place}", f"hf upload OWNER/NAME {place}  (read its README.md first)"]
    for number, line in enumerate(more):
        fact("" if number else "more", line)
