"""The settings of ``gpt serve``. Imports no torch."""

import re
from dataclasses import dataclass

from gpt.errors import UserError
from gpt.settings import check_options, option

_ADDRESS, _LOAD = "Address", "Load"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServeConfig:
    """The settings of ``gpt serve``. Raises `UserError` for values without a meaning."""

    host: str = option("127.0.0.1", "Address to listen at; one that others reach needs a key.", panel=_ADDRESS)
    port: int = option(8000, "Port to listen at; 0: a free one.", panel=_ADDRESS, low=0, high=65_535)
    name: str | None = option(None, "The model's name for clients.", panel=_ADDRESS, shown="the run's or the folder's")
    cors: tuple[str, ...] = option(
        (),
        "ORIGIN whose web pages or apps may send requests, such as https://example.org or app://obsidian.md; may be "
        "repeated.",
        panel=_ADDRESS,
        shown="none",
    )
    allow_host: tuple[str, ...] = option(
        (),
        "NAME under which clients may reach a server at a loopback address, such as host.docker.internal; may be "
        "repeated.",
        panel=_ADDRESS,
        shown="none",
    )
    api_key: str | None = option(
        None,
        "The key that clients must send. Others on this machine see a command line: set GPT_SERVE_API_KEY instead.",
        panel=_ADDRESS,
        shown="none",
    )
    max_batch: int = option(
        0, "Texts that are generated at once.", panel=_LOAD, shown="by the device's memory", low=0, high=1024
    )
    queue: int = option(
        64, "Requests that may wait beside those that run; further ones are told to come later.", panel=_LOAD, low=0
    )
    limit_tokens: int = option(
        4096, "Tokens that a request may ask for, and those that its prompt may have.", panel=_LOAD, low=1
    )
    grace: float = option(30, "Seconds that running requests have after a Ctrl-C.", panel=_LOAD, low=0, high=86_400)

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
