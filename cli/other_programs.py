"""Hints for words of other programs."""

from typing import Any

COMMANDS = {  # Hints for other programs' commands.
    word: hint
    for words, hint in {
        "generate complete completion ask predict infer inference prompt": "gpt sample PROMPT generates text",
        "run": "gpt chat talks with a model, gpt sample PROMPT generates text; -m names the model",
        "repl interactive talk conversation": "gpt chat talks with a model; -m names the model",
        "finetune fine-tune sft lora": "gpt train TEXT --init MODEL fine-tunes a model",
        "pretrain fit": "gpt train TEXT trains a model",
        "resume continue": "gpt train --resume resumes the newest unfinished run",
        "pull download fetch": "models are downloaded on first use: gpt chat -m hf:OWNER/NAME; gpt data fetch NAME "
        "downloads a corpus",
        "list ls models ps": "gpt runs lists your runs, gpt data list corpora, gpt params --list model sizes",
        "convert quantize push save merge": "gpt export -m MODEL -o FILE.gguf, or -o FOLDER; --dtype quantizes",
        "server api web ui": "gpt serve serves a model over HTTP, with a web page",
        "encode decode detokenize": "gpt tokenizer encode TEXT, or gpt tokenizer decode IDS; -m names the model",
        "ppl perplexity evaluate test validate": "gpt eval TEXT -m MODEL measures loss and perplexity",
        "info summary size count": "gpt params MODEL counts its parameters, gpt report RUN shows its training",
        "plot log logs": "gpt report RUN shows how a run went",
        "attention visualize": "gpt inspect attention PROMPT shows what each head attends to",
        "datasets": "gpt data list lists corpora",
        "version": "gpt --version prints the version",
        "help": "gpt --help lists the commands, gpt COMMAND --help explains one",
    }.items()
    for word in words.split()
}


def explain_extra_argument(error: Any, context: Any) -> str | None:
    """Returns a hint for an extra argument of a command with ``--model``, or None for other errors."""
    flags = {flag for param in context.command.params for flag in param.opts} if context is not None else set()
    if "unexpected extra argument" not in error.message or "--model" not in flags:
        return None
    takes_text = any(param.param_type_name == "argument" for param in context.command.params)
    quotes = f'a text of several words needs quotes: {context.command_path} "Once upon a time"; ' * takes_text
    return f"{quotes}-m names the model{', -o the output' if '--out' in flags else ''}"
