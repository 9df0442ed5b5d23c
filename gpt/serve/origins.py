"""Rejects foreign hosts and origins, and formats errors like OpenAI's API."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt.config.serve import LOOPBACK, ServeConfig, is_loopback, strip_port
from gpt.serve.protocol import ApiError

RETRY_SECONDS = 1
_UNIQUE_HEADERS = ("host", "origin", "authorization", "content-type", "content-encoding")


def error_response(error: ApiError) -> Response:
    """Returns the response for an error."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if error.status == 429 else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


class Guard:
    """ASGI middleware that rejects foreign hosts and origins, since any web page can reach a server on this machine."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self.config = config
        # Allows all request headers, since clients add custom headers.
        self.app = CORSMiddleware(
            app, config.cors, ("GET", "POST"), ("*",), allow_private_network=True,
            expose_headers=("Retry-After", "X-Request-ID"),
        )  # fmt: skip
        self.hosts: set[str] | None = None  # The allowed names besides the loopback's. None allows any host.
        if config.host in LOOPBACK:
            self.hosts = {name.lower() for name in config.allow_host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or rejects a request."""
        if error := self._find_error(Headers(scope=scope)):
            await error_response(error)(scope, receive, send)
        else:
            await self.app(_normalize_path(scope), receive, send)

    def _find_error(self, headers: Headers) -> ApiError | None:
        for name in _UNIQUE_HEADERS:
            if len(headers.getlist(name)) > 1:
                return ApiError(400, f"the request has several {name} headers; send one")
        host, origin = headers.get("host"), headers.get("origin")
        # HTTP/1.0 health checks have no Host header. Browsers, the only threat, always send it.
        if self.hosts is not None and host is not None and not (is_loopback(host) or strip_port(host) in self.hosts):
            return _refusal_error("host", strip_port(host), "--allow-host")
        if origin in (None, f"http://{host}", f"https://{host}", *self.config.cors):
            return None
        if origin == "null":
            reason = "the page has no origin, like a page opened from a file"
            return ApiError(403, f"{reason}; serve it over HTTP and allow that origin with gpt serve --cors")
        return _refusal_error("origin", str(origin), "--cors")


def _normalize_path(scope: Scope) -> Scope:
    """Removes doubled and trailing slashes from the path. Clients create them by joining a base URL and a route. A
    redirect would have the wrong scheme behind a proxy, and many clients don't follow redirects."""
    return {**scope, "path": "/" + "/".join(filter(None, scope["path"].split("/")))}


def _refusal_error(kind: str, value: str, option: str) -> ApiError:
    advice = f"the server's operator can allow it with gpt serve {option} {value:.80}"
    return ApiError(403, f"the {kind} {value:.80} is not allowed; {advice}")
