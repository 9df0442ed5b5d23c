"""``gpt serve``."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated

from gpt.config.serve import LOOPBACK, ServeConfig
from gpt.system.distribution import install_extra
from gpt.system.errors import UserError, WorkError

from ..options import MODEL_HELP, Device, Dtype, Threads, option, takes
from ..show import progress, render


@takes(ServeConfig)
def serve(
    settings: ServeConfig,
    words: list[str],
    model: Annotated[
        list[str] | None,
        option(
            "--model", "-m", metavar="MODEL", help=f"{MODEL_HELP}; repeatable", show_default="best of the newest run"
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Serve a model over an OpenAI-compatible API, with a chat page.

    gpt serve -m runs/book
    gpt serve -m runs/book -m qwen.gguf
    gpt serve -m hf:Qwen/Qwen3-0.6B --dtype int8 --port 8080
    """
    if any(word.partition("=")[0] == "--api-key" for word in words):
        render.note("other users of this machine can see --api-key; set GPT_SERVE_API_KEY instead")
    if settings.allow_host and settings.host not in LOOPBACK:
        render.note(f"--allow-host has no effect with --host {settings.host}, which accepts any host name")
    from gpt.runs.folder import newest_run

    # A later run must not take the newest one's place when that is loaded again.
    paths = [path or newest_run().as_posix() for path in model or [""]]
    names = [settings.name or _client_name(path) for path in paths]
    if duplicate := next((name for name, count in Counter(names).items() if count > 1), None):
        raise UserError(f"two models are called {duplicate}", "leave out --name, or give paths that end differently")
    with progress.startup_spinner(quiet=False):
        from gpt import api

        try:
            from gpt.serve.server import ServedModel
            from gpt.serve.server import serve as run
        except ImportError as error:
            raise WorkError(f"serving needs the package {error.name}", install_extra("serve")) from None

    def load(path: str, name: str) -> ServedModel:
        loaded = api.load(path, device=device, dtype=dtype, threads=threads, note=render.note, for_decoding=True)
        return ServedModel(name, loaded.model, loaded.tokenizer, loaded.compute, loaded.path)

    loads = [partial(load, path, name) for path, name in zip(paths, names, strict=True)]
    run(loads, settings, lambda where: render.note(f"serving {where}"), render.note)


def _client_name(path: str) -> str:
    """Returns the name of a model for clients. They can read it without a key, so it must not be an absolute path."""
    return Path(path).name if Path(path).is_absolute() else path
