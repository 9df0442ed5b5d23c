"""Suggests our commands and options for other programs' names."""

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

# Other programs' names for our options and arguments.
_FOREIGN_OPTIONS = {
    "--steps": "max-iters max-steps num-steps train-steps num-train-steps max-train-steps iters iterations",
    "--epochs": "num-epochs num-train-epochs max-epochs n-epochs",
    "--batch-tokens": "batch-size train-batch-size gradient-accumulation-steps grad-accum-steps total-batch-size",
    "--micro-batch": "batch-size per-device-train-batch-size device-batch-size micro-batch-size train-micro-batch-size",
    "--batch": "batch-size num-sequences parallel",
    "--max-batch": "batch-size parallel max-num-seqs slots",
    "--lr": "learning-rate peak-lr max-lr",
    "--schedule": "lr-scheduler-type lr-scheduler lr-schedule",
    "--warmup": "warmup-steps warmup-iters lr-warmup-steps num-warmup-steps warmup-ratio",
    "--clip": "max-grad-norm grad-clip gradient-clip clip-grad",
    "--optimizer": "optim",
    "--eval-every": "eval-steps eval-interval val-interval eval-freq",
    "--save-every": "save-steps save-interval checkpoint-interval",
    "--keep": "save-total-limit",
    "--patience": "early-stopping-patience",
    "--val-fraction": "val-split validation-split test-size",
    "--val-text": "val-file validation-file eval-data eval-dataset val-data",
    "--block-size": "context-length ctx-size context-size n-ctx ctx seq-len seq-length sequence-length max-seq-len"
    " max-seq-length max-length n-positions max-position-embeddings",
    "--context": "context-length ctx-size context-size n-ctx ctx max-model-len max-seq-len",
    "--n-layer": "num-layers num-hidden-layers n-layers layers depth",
    "--n-head": "num-heads num-attention-heads n-heads heads",
    "--n-kv-head": "num-key-value-heads num-kv-heads n-kv-heads",
    "--n-embd": "hidden-size d-model embed-dim dim width",
    "--name": "served-model-name alias",
    "--init": "model-name model-name-or-path model-id pretrained base-model model m init-from",
    "--resume": "resume-from-checkpoint resume-from",
    "--lora-rank": "lora lora-r lora-dim rank",
    "--lora-targets": "target-modules lora-target-modules",
    "--recompute": "gradient-checkpointing activation-checkpointing",
    "--nproc": "nproc-per-node num-processes num-gpus gpus",
    "--shard": "fsdp zero",
    "--log": "wandb report-to",
    "--model": "model-name model-path model-name-or-path model-id checkpoint ckpt ckpt-path",
    "--out": "output output-dir out-dir output-file outfile save-dir",
    "--temperature": "temp",
    "--max-tokens": "n-predict max-new-tokens num-predict max-length max-completion-tokens length",
    "--min-tokens": "min-length min-new-tokens",
    "--num": "num-return-sequences num-samples n-samples n n-best best-of",
    "--beam": "num-beams beams beam-size beam-width",
    "--repetition-penalty": "repeat-penalty",
    "--no-repeat-ngram": "no-repeat-ngram-size",
    "--stop": "stop-sequence stop-sequences reverse-prompt stop-strings eos-token",
    "--bias": "logit-bias",
    "--regex": "grammar guided-regex guided-grammar",
    "--json-schema": "guided-json schema grammar",
    "--prompt-file": "file",
    "--interactive": "conversation chat cnv",
    "--device": "n-gpu-layers gpu-layers ngl gpu cuda use-gpu no-cuda",
    "--dtype": "bf16 fp16 fp32 torch-dtype precision quantize quantization quant outtype type",
    "--devices": "memory flops time",
    "--per-token": "tokens",
    "--threads": "num-threads n-threads",
    "--jobs": "num-workers workers num-proc",
    "--seed": "random-seed",
    "prompt": "prompt text input p",
    "targets": "model model-name m",
    "text": "text texts data data-path dataset dataset-name train-data train-file input file",
}
_HINTS = {  # Hints for options without an equivalent here.
    "do-sample": "sampling is the default; --greedy turns it off",
    "lora-dropout": "adapters are trained without dropout of their own",
    **dict.fromkeys(("load-in-4bit", "load-in-8bit"), "only sampling quantizes: --dtype int4 or int8"),
    **dict.fromkeys(
        ("ctx-size", "context-length", "context-size", "n-ctx", "max-seq-len"),
        "the context length is fixed when a model is trained: gpt train --block-size",
    ),
}


def suggest(error: Any, context: Any) -> tuple[str, str] | None:
    """Returns a message and hint for another program's option or an extra argument, or None for other errors."""
    if context is None:
        return None
    shown = [parameter for parameter in context.command.params if not parameter.hidden]
    parameters = {flag: parameter for parameter in shown for flag in parameter.opts}
    if "unexpected extra argument" in error.message and "--model" in parameters:
        quotes_hint = f'a text of several words needs quotes: {context.command_path} "Once upon a time"; '
        takes_text = any(parameter.param_type_name == "argument" for parameter in context.command.params)
        out_hint = ", -o the output" if "--out" in parameters else ""
        return error.message, f"{quotes_hint if takes_text else ''}-m names the model{out_hint}"
    if not hasattr(error, "possibilities"):  # Not an error about an unknown option.
        return None
    foreign_name = error.option_name.lower().lstrip("-").replace("_", "-")
    ours = [name for name, aliases in _FOREIGN_OPTIONS.items() if foreign_name in aliases.split()]
    candidates = [name for name in (f"--{foreign_name}", *ours) if name in parameters]
    hints = (_describe(name, parameters[name], context) for name in candidates)
    hint = "; ".join(hints) or _HINTS.get(foreign_name)
    return (f"there is no option {error.option_name}", hint) if hint else None


def _describe(name: str, parameter: Any, context: Any) -> str:
    if not name.startswith("-"):
        word = parameter.metavar or name.upper()
        return f"{word} is positional: {context.command_path} {word}"
    return f"{name}: {parameter.help}"
