"""``gpt serve``."""

from pathlib import Path

from gpt.config.serve import LOOPBACK, ServeConfig
from gpt.system.distribution import install_extra
from gpt.system.errors import WorkError

from ..options import Base, Device, Dtype, Model, Threads, takes
from ..show import progress, render


@takes(ServeConfig)
def serve(
    settings: ServeConfig,
    words: list[str],
    model: Model = None,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Serve a model over an OpenAI-compatible API, with a chat page.

    gpt serve -m runs/book
    gpt serve -m hf:Qwen/Qwen3-0.6B --dtype int8 --port 8080
    """
    if any(word.partition("=")[0] == "--api-key" for word in words):
        render.note("other users of this machine can see --api-key; set GPT_SERVE_API_KEY instead")
    if settings.allow_host and settings.host not in LOOPBACK:
        render.note(f"--allow-host has no effect with --host {settings.host}, which accepts any host name")
    with progress.startup_spinner(quiet=False):
        from gpt import api

        try:
            from gpt.serve.server import serve as run
        except ImportError as error:
            raise WorkError(f"serving needs the package {error.name}", install_extra("serve")) from None
    loaded = api.load(
        model, base=base, device=device, dtype=dtype, threads=threads, note=render.note, for_decoding=True
    )
    path = Path(loaded.path)
    model_path = path.parent if (path.parent / "run.json").exists() else path
    name = settings.name or model or model_path.as_posix()
    if settings.name is None and Path(name).is_absolute():
        name = Path(name).name  # Clients without a key can read the name, so it must not be a path.
    run(
        loaded.model, loaded.tokenizer, loaded.compute, name, settings,
        lambda address: render.note(f"serving {name} at {address}"), render.note, path,
    )  # fmt: skip
