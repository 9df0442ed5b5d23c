"""Rejects foreign hosts and origins, and formats errors like OpenAI's API."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt.serve.protocol import ApiError
from gpt.serve_config import LOOPBACK, ServeConfig

RETRY_SECONDS = 1
_UNIQUE_HEADERS = (b"host", b"origin", b"authorization", b"content-type", b"content-encoding")


def error_response(error: ApiError) -> Response:
    """Returns the response for an error."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == 429 else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


class Guard:
    """ASGI middleware that rejects foreign hosts and origins, since any web page can reach a server on this machine."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self.app, self.config = app, config
        self.hosts: set[str] | None = None  # None allows any host.
        if config.host in LOOPBACK:
            self.hosts = {*LOOPBACK, "[::1]", *(name.lower() for name in config.allow_host)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or rejects a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        names = [key.lower() for key, _ in scope["headers"]]
        for name in _UNIQUE_HEADERS:
            if names.count(name) > 1:
                error = ApiError(400, f"the request has several {name.decode()} headers; send one")
                await error_response(error)(scope, receive, send)
                return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        host, origin = headers.get("host"), headers.get("origin")
        is_same_origin = origin is None or origin in (f"http://{host}", f"https://{host}")
        # HTTP/1.0 health checks have no Host header. Browsers, the only threat, always send it.
        if self.hosts is not None and host is not None and _strip_port(host).lower() not in self.hosts:
            refusal = _refusal_error("host", _strip_port(host), "--allow-host")
            await error_response(refusal)(scope, receive, send)
        elif is_same_origin:
            await self.app(_normalize_path(scope), receive, send)
        elif origin == "null":
            reason = "the page has no origin, like a page opened from a file"
            refusal = ApiError(403, f"{reason}; serve it over HTTP and allow that origin with gpt serve --cors")
            await error_response(refusal)(scope, receive, send)
        elif origin not in self.config.cors:
            await error_response(_refusal_error("origin", str(origin), "--cors"))(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=_preflight_headers(headers))(scope, receive, send)
        else:
            await self._answer_cross_origin(scope, receive, send, str(origin))

    async def _answer_cross_origin(self, scope: Scope, receive: Receive, send: Send, origin: str) -> None:
        """Answers a request from an allowed foreign origin."""
        cors_headers = {**_origin_headers(origin), "access-control-expose-headers": "retry-after, x-request-id"}

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(key.encode(), value.encode()) for key, value in cors_headers.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self.app(_normalize_path(scope), receive, send_with_headers)


def _normalize_path(scope: Scope) -> Scope:
    """Removes doubled and trailing slashes from the path. Clients create them by joining a base URL and a route. A
    redirect would have the wrong scheme behind a proxy, and many clients don't follow redirects."""
    return {**scope, "path": "/" + "/".join(filter(None, scope["path"].split("/")))}


def _origin_headers(origin: str) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"}


def _preflight_headers(request_headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the response headers for a preflight request. Allows all request headers, since clients add custom
    headers, and allows requests from public pages to a private network."""
    response_headers = {
        **_origin_headers(request_headers["origin"]),
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": request_headers.get(
            "access-control-request-headers", "authorization, content-type"
        ),
        "access-control-max-age": "600",
    }
    if request_headers.get("access-control-request-private-network") == "true":
        response_headers["access-control-allow-private-network"] = "true"
    return response_headers


def _refusal_error(kind: str, value: str, option: str) -> ApiError:
    advice = f"the server's operator can allow it with gpt serve {option} {value:.80}"
    return ApiError(403, f"the {kind} {value:.80} is not allowed; {advice}")


def _strip_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if port.isdigit() else host
