"""Request ids, request counts and the access log."""

import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt.serve.metrics import ServerMetrics

HEADER = b"x-request-id"
_VALID_ID = re.compile(rb"[!-~]{1,128}")


class Access:
    """ASGI middleware that counts requests and returns each request's id with the response: the client's id if valid,
    or a random id.

    With ``log``, logs one line per request, without texts or keys. In `request.state`, handlers set the ``route``, the
    final ``status`` of a stream, and the ``answer``, which has the token counts.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, log: Callable[[str], None] | None = None) -> None:
        self.app, self.metrics, self.log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        client_id = dict(scope["headers"]).get(HEADER, b"")
        request_id = client_id if _VALID_ID.fullmatch(client_id) else secrets.token_hex(16).encode()
        state, start_time = scope.setdefault("state", {}), time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.setdefault("status", message["status"])
                message = {**message, "headers": [*message["headers"], (HEADER, request_id)]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            status = state.get("status", 499)  # The client disconnected before the response.
            if "route" in state:
                self.metrics.requests.labels(state["route"], status).inc()
            if self.log is not None:
                usage = state["answer"].usage() if "answer" in state else {}
                self.log(
                    f"time={datetime.now(UTC).isoformat(timespec='milliseconds')} id={request_id.decode()} "
                    f"method={scope['method']:.20} path={scope['raw_path'].decode('ascii', 'replace'):.200} "
                    f"status={status} prompt_tokens={usage.get('prompt_tokens', 0)} "
                    f"completion_tokens={usage.get('completion_tokens', 0)} seconds={time.monotonic() - start_time:.3f}"
                )
