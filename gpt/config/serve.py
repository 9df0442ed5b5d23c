"""The settings of ``gpt serve``. Imports no torch."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gpt.config.settings import check_options, option
from gpt.system.errors import UserError

_address, _load = (partial(option, panel=name) for name in ("Address", "Load"))
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def strip_port(host: str) -> str:
    """Returns the name in a Host header, in lower case."""
    name, _, port = host.lower().rpartition(":")
    return name if port.isdigit() else host.lower()


def is_loopback(host: str) -> bool:
    """Whether a Host header names this machine. Any other name can be a web page's, which resolves to this address."""
    return strip_port(host).strip("[]") in LOOPBACK


@dataclass(frozen=True)
class ServeConfig:
    """The settings of ``gpt serve``. Raises `UserError` for invalid values."""

    host: str = _address(
        "127.0.0.1", "Address to listen on; a key is required unless it is local", metavar="ADDRESS", level="basic"
    )
    port: int = _address(8000, "Port to listen on; 0: a free one", level="basic", low=0, high=65_535)
    name: str | None = _address(
        None, "Model name for clients", metavar="NAME", shown="name of the run or folder", level="basic"
    )
    cors: tuple[str, ...] = _address(
        (), "Let web pages and apps of this origin send requests; repeatable", metavar="ORIGIN", level="basic"
    )
    allow_host: tuple[str, ...] = _address(
        (), "Another host name of a local server, such as host.docker.internal; repeatable", metavar="NAME"
    )
    api_key: str | None = _address(
        None, "Key that clients must send; GPT_SERVE_API_KEY hides it from other users", metavar="KEY", level="basic"
    )
    max_batch: int = _load(
        0, "Texts generated at the same time; others wait (--queue)", shown="set by the device's memory",
        level="basic", low=0, high=1024,
    )  # fmt: skip
    context: int = _load(
        0, "Context length in tokens; a shorter one needs less memory", shown="the model's", level="basic", low=0
    )
    queue: int = _load(64, "Maximum number of waiting requests; further ones are told to retry", low=0)
    limit_tokens: int = _load(
        0, "Maximum tokens to generate per text", shown="the context, or 4,096 if that is more", low=0
    )
    idle_unload: float = _load(
        0, "Free a model's memory after MINUTES without a request; the next one loads it again", metavar="MINUTES",
        shown="never", low=0, high=10**6,
    )  # fmt: skip
    grace: float = _load(30, "Seconds that requests in flight get after Ctrl-C", low=0, high=86_400)
    defaults: Literal["model", "openai"] = option(
        "model", "Default sampling settings: the model's own, or OpenAI's", panel="Sampling"
    )
    with_text: bool = option(
        False, "Let clients see passages of the training text that a text repeats", panel="Page", level="basic"
    )
    access_log: bool = option(False, "Log each request to stderr: id, path, status, tokens and seconds", panel="Output")

    def __post_init__(self) -> None:
        check_options(self)
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("the key is empty or has characters that a header cannot contain", "use printable ASCII")
        if self.host not in LOOPBACK and self.api_key is None:
            message = f"others can reach {self.host}, and there is no key"
            raise UserError(message, "set GPT_SERVE_API_KEY, or leave out --host")
        for origin in self.cors:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/*]+", origin):
                raise UserError(f'"{origin}" is not an origin', "such as --cors https://example.org, without a path")
        for name in self.allow_host:
            if not re.fullmatch(r"[^\s/*:@\[\]]+|\[[0-9a-fA-F:.]+\]", name):
                message = f'"{name}" is not a host name'
                raise UserError(message, "such as --allow-host host.docker.internal, without a port")
