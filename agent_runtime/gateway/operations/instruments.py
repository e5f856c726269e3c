"""What the gateway measures while it serves, as Prometheus instruments in a registry of their own."""

from agent_runtime.gateway.completion import WireForm

PROTOCOLS: tuple[WireForm, ...] = ("chat", "messages", "responses", "completions")
OUTCOMES = ("done", "client_left", "error", "error_in_stream")
FINISH_REASONS = ("stop", "length", "tool_calls")

MAX_CODES = 64
"""Error codes that get a series of their own; those of another server behind the gateway could be any."""
OTHER_CODE = "other"

FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
COMPLETION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Instruments:
    """Counters, gauges and histograms. No label ever holds what a client wrote: their values are listed here.

    Raises:
        ImportError: prometheus_client is not installed.
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

        self.registry: CollectorRegistry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"k3_gateway_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"k3_gateway_{name}", about, ("protocol",), registry=self.registry)

        def seconds(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            name = f"k3_gateway_{name}_seconds"
            return Histogram(name, about, ("protocol",), buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "Requests answered, by route", "protocol", "route", "status")
        self.errors = counter("errors", "Failures told to clients, in streams too", "protocol", "code")
        self.completions = counter("completions", "Completions that are over", "protocol", "outcome")
        self.finishes = counter("finishes", "Choices that ended, by finish reason", "protocol", "reason")
        self.running = gauge("completions_running", "Completions at the engine")
        self.waiting = gauge("completions_waiting", "Completions at the engine without a first token")
        self.first_token = seconds(
            "time_to_first_token", "From the request's arrival to its first token", FIRST_TOKEN_BUCKETS_S
        )
        self.total = seconds("completion", "From the request's arrival to the end of its answer", COMPLETION_BUCKETS_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of completions that began", "protocol")
        self.cached_tokens = counter("cached_tokens", "Those of them that the engine reused", "protocol")
        self.output_tokens = counter("output_tokens", "Output tokens of choices that ended", "protocol")
        self.reasoning_tokens = counter("reasoning_tokens", "Those of them that are reasoning", "protocol")
        self.compressions = Counter(
            "k3_gateway_compressions_reported",
            "Compressed histories that agent runtimes told of",
            registry=self.registry,
        )
        self._codes: set[str] = set()
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Series exist before the first event, so that rates over them see it."""
        for protocol in PROTOCOLS:
            for plain in (self.running, self.waiting, self.first_token, self.total):
                plain.labels(protocol)
            for counted in (self.prompt_tokens, self.cached_tokens, self.output_tokens, self.reasoning_tokens):
                counted.labels(protocol)
            for outcome in OUTCOMES:
                self.completions.labels(protocol, outcome)
            for reason in FINISH_REASONS:
                self.finishes.labels(protocol, reason)

    def error(self, protocol: WireForm | str, code: str) -> None:
        """Count a failure that a client was told of."""
        if code not in self._codes:
            if len(self._codes) >= MAX_CODES or not (code.isascii() and code.isidentifier() and len(code) <= 64):
                code = OTHER_CODE
            self._codes.add(code)
        self.errors.labels(protocol, code).inc()


def make_instruments() -> Instruments | None:
    """The instruments; None where prometheus_client is not installed: then nothing is measured."""
    try:
        return Instruments()
    except ImportError:
        return None
