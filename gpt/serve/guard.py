"""Refuses foreign hosts and origins, and says errors as OpenAI's API does."""

from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt.serve.protocol import ApiError
from gpt.serve_config import LOOPBACK, ServeConfig

RETRY_SECONDS = 1


def error_response(error: ApiError) -> Response:
    """The answer for an error."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == 429 else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


class Guard:
    """Refuses hosts and origins that are not served: any web page can reach a server on this machine."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self.app, self.config = app, config
        self.hosts = {*LOOPBACK, "[::1]", config.host, f"[{config.host}]"} if config.host in LOOPBACK else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        own = origin is None or origin in (f"http://{host}", f"https://{host}")
        if self.hosts is not None and _without_port(host).lower() not in self.hosts:
            await error_response(ApiError(403, f"the host {host:.80} is not served here"))(scope, receive, send)
        elif own:
            await self.app(scope, receive, send)
        elif origin not in self.config.cors:
            refusal = ApiError(403, f"the origin {origin:.80} is not allowed; --cors allows one")
            await error_response(refusal)(scope, receive, send)
        else:
            await self._across(scope, receive, send, str(origin))

    async def _across(self, scope: Scope, receive: Receive, send: Send, origin: str) -> None:
        """Answers a page of another origin, which is allowed."""
        allow = {
            "access-control-allow-origin": origin,
            "vary": "Origin",
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "authorization, content-type",
            "access-control-max-age": "600",
        }
        if scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=allow)(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(key.encode(), value.encode()) for key, value in allow.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self.app(scope, receive, with_headers)


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if port.isdigit() else host
