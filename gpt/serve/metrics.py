"""The server's Prometheus metrics."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """The server's metrics, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("gpt_requests", "Requests by route and status.", ["route", "status"], **options)
        self.cancelled = Counter("gpt_requests_cancelled", "Requests whose client disconnected.", **options)
        self.prompt_tokens = Counter("gpt_prompt_tokens", "Prompt tokens processed.", **options)
        self.cached_tokens = Counter("gpt_cached_prompt_tokens", "Prompt tokens from the prefix cache.", **options)
        self.generated_tokens = Counter("gpt_generated_tokens", "Tokens generated.", **options)
        self.waiting = Gauge("gpt_requests_waiting", "Requests in the queue.", **options)
        self.running = Gauge("gpt_texts_running", "Texts being generated.", **options)
        self.cached = Gauge("gpt_cache_positions", "Tokens in the KV cache.", **options)
        self.step_seconds = Histogram("gpt_step_seconds", "Seconds per decoding step.", buckets=_SECONDS, **options)
        self.queue_seconds = Histogram(
            "gpt_queue_seconds", "Seconds until a slot was free.", buckets=_SECONDS, **options
        )
        self.first_token = Histogram(
            "gpt_first_token_seconds", "Seconds to the first token.", buckets=_SECONDS, **options
        )
        self.seconds = Histogram("gpt_request_seconds", "Seconds per request.", buckets=_SECONDS, **options)
