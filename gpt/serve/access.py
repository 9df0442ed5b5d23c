"""Request ids, and the access log."""

import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_VALID = re.compile(rb"[!-~]{1,128}")


class Access:
    """ASGI middleware that gives each request an id, the client's own if it is valid, and sends it with the answer.

    With ``log`` it reports each request in one line, without texts and keys. `request.state` has what it cannot see:
    how a stream ended as ``status``, and the ``answer`` whose tokens are counted.
    """

    def __init__(self, app: ASGIApp, log: Callable[[str], None] | None = None) -> None:
        self.app, self.log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER, b"")
        id = given if _VALID.fullmatch(given) else secrets.token_hex(16).encode()
        state, started = scope.setdefault("state", {}), time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.setdefault("status", message["status"])
                message = {**message, "headers": [*message["headers"], (HEADER, id)]}
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if self.log is not None:
                usage = state["answer"].usage() if "answer" in state else {}
                self.log(
                    f"time={datetime.now(UTC).isoformat(timespec='milliseconds')} id={id.decode()} "
                    f"method={scope['method']:.20} path={scope['raw_path'].decode('ascii', 'replace'):.200} "
                    f"status={state.get('status', 499)} prompt_tokens={usage.get('prompt_tokens', 0)} "
                    f"completion_tokens={usage.get('completion_tokens', 0)} seconds={time.monotonic() - started:.3f}"
                )
