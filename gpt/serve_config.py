"""The settings of ``gpt serve``. Imports no torch."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gpt.errors import UserError
from gpt.settings import check_options, option

_address, _load = (partial(option, panel=name) for name in ("Address", "Load"))
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServeConfig:
    """The settings of ``gpt serve``. Raises `UserError` for values without a meaning."""

    host: str = _address("127.0.0.1", "Address to listen at; one that others reach needs a key.")
    port: int = _address(8000, "Port to listen at; 0: a free one.", low=0, high=65_535)
    name: str | None = _address(None, "The model's name for clients.", shown="the run's or the folder's")
    cors: tuple[str, ...] = _address(
        (), "ORIGIN whose web pages or apps may send requests, such as https://example.org or app://obsidian.md; may "
        "be repeated.", shown="none",
    )  # fmt: skip
    allow_host: tuple[str, ...] = _address(
        (), "NAME under which clients may reach a server at a loopback address, such as host.docker.internal; may be "
        "repeated.", shown="none",
    )  # fmt: skip
    api_key: str | None = _address(
        None,
        "The key that clients must send. Others on this machine see a command line: set GPT_SERVE_API_KEY instead.",
        shown="none",
    )  # fmt: skip
    max_batch: int = _load(0, "Texts that are generated at once.", shown="by the device's memory", low=0, high=1024)
    context: int = _load(
        0, "Context length in tokens; a shorter one needs less memory.",
        shown="the model's context", low=0,
    )  # fmt: skip
    queue: int = _load(64, "Requests that may wait beside those that run; further ones are told to come later.", low=0)
    limit_tokens: int = _load(4096, "Tokens that a request may ask for, and those that its prompt may have.", low=1)
    compile: Literal["auto", "on", "off"] = _load(
        "auto", "Compile steps of one text on a CPU, in float32, int8 or int4: some 20 seconds at the first start. "
        "auto: if there is a C++ compiler, except on macOS.",
    )  # fmt: skip
    grace: float = _load(30, "Seconds that running requests have after a Ctrl-C.", low=0, high=86_400)
    defaults: Literal["model", "openai"] = option(
        "model", "Sampling settings that requests leave out: model takes them from the model's generation_config.json, "
        "openai ignores it.", panel="Choice of the next token",
    )  # fmt: skip
    access_log: bool = option(
        False, "Print a line on stderr for each request: its id, path, status, tokens and seconds.", panel="Output"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("the key is empty, or has characters that no header can carry", "take printable ASCII")
        if self.host not in LOOPBACK and self.api_key is None:
            raise UserError(
                f"others could reach {self.host}, and there is no key", "set GPT_SERVE_API_KEY, or leave out --host"
            )
        for origin in self.cors:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/*]+", origin):
                raise UserError(f'"{origin}" is no origin', "such as --cors https://example.org, without a path")
        for name in self.allow_host:
            if not re.fullmatch(r"[^\s/*:@\[\]]+|\[[0-9a-fA-F:.]+\]", name):
                raise UserError(
                    f'"{name}" is not a host name', "such as --allow-host host.docker.internal, without a port"
                )
