"""Refuses foreign hosts and origins, and says errors as OpenAI's API does."""

from collections.abc import Mapping
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
        self.hosts: set[str] | None = None  # any
        if config.host in LOOPBACK:
            self.hosts = {*LOOPBACK, "[::1]", *(name.lower() for name in config.allow_host)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        host, origin = headers.get("host"), headers.get("origin")
        own = origin is None or origin in (f"http://{host}", f"https://{host}")
        # Health checks in HTTP/1.0 have no Host header. Browsers, against which this is, always send one.
        if self.hosts is not None and host is not None and _without_port(host).lower() not in self.hosts:
            refusal = _refusal("host", _without_port(host), "--allow-host")
            await error_response(refusal)(scope, receive, send)
        elif own:
            await self.app(_without_slashes(scope), receive, send)
        elif origin == "null":
            why = "the page has no origin, like a page opened from a file"
            refusal = ApiError(403, f"{why}; serve it over HTTP and allow that origin with gpt serve --cors")
            await error_response(refusal)(scope, receive, send)
        elif origin not in self.config.cors:
            await error_response(_refusal("origin", str(origin), "--cors"))(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_preflight(headers))(scope, receive, send)
        else:
            await self._across(scope, receive, send, str(origin))

    async def _across(self, scope: Scope, receive: Receive, send: Send, origin: str) -> None:
        """Answers a page of another origin, which is allowed."""
        allow = {**_origin(origin), "access-control-expose-headers": "retry-after, x-request-id"}

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(key.encode(), value.encode()) for key, value in allow.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self.app(_without_slashes(scope), receive, with_headers)


def _without_slashes(scope: Scope) -> Scope:
    """Returns a request's scope without doubled and trailing slashes in its path, which clients make when they join a
    base URL with a route. A redirect names the wrong scheme behind a proxy, and many clients do not follow it."""
    return {**scope, "path": "/" + "/".join(filter(None, scope["path"].split("/")))}


def _origin(origin: str) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"}


def _preflight(asked: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers by which a browser sends the request that it asks about: with any header, since clients have
    some of their own, and from a public page to a private network."""
    allow = {
        **_origin(asked["origin"]),
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": asked.get("access-control-request-headers", "authorization, content-type"),
        "access-control-max-age": "600",
    }
    if asked.get("access-control-request-private-network") == "true":
        allow["access-control-allow-private-network"] = "true"
    return allow


def _refusal(what: str, value: str, option: str) -> ApiError:
    by = f"the server's operator can allow it with gpt serve {option} {value:.80}"
    return ApiError(403, f"the {what} {value:.80} is not allowed; {by}")


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if port.isdigit() else host
