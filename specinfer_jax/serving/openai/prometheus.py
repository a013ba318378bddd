"""What /metrics shows: the engine's snapshot at the time of the scrape, and what the server sees of requests.

Free of jax.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specinfer_jax.metrics import RequestStats
from specinfer_jax.serving.async_protocol import AsyncEngine, Buckets, EngineSnapshot

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_TOKENS_PER_STEP = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10)


class ServerMetrics:
    """Counters and histograms of one server."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(EngineCollector(engine))
        own = {"namespace": "specinfer", "registry": self._registry}
        self._requests = Counter("requests", "HTTP requests.", ("endpoint", "status"), **own)
        self._seconds = Histogram("request_seconds", "Wall time of requests.", ("endpoint",), buckets=_SECONDS, **own)
        self.in_flight = Gauge("requests_in_flight", "HTTP requests under way.", **own)
        self._first = Histogram(
            "time_to_first_token_seconds", "From the request to the first piece of each continuation.",
            buckets=_SECONDS, **own,
        )  # fmt: skip
        self._between = Histogram(
            "time_between_tokens_seconds", "Time between pieces of a continuation, per token of the later one.",
            buckets=_SECONDS, **own,
        )  # fmt: skip
        self._tokens_per_step = Histogram(
            "tokens_per_step", "Tokens per LLM pass of each request.", buckets=_TOKENS_PER_STEP, **own
        )

    def on_piece(self, seconds: float, num_tokens: int, *, is_first: bool) -> None:
        """A piece of `num_tokens` came `seconds` after the one before it, or after the request."""
        if is_first:
            self._first.observe(seconds)
            return
        for _ in range(num_tokens):
            self._between.observe(seconds / num_tokens)

    def on_stats(self, stats: RequestStats) -> None:
        """A request's answers are whole."""
        if stats.tokens_per_step is not None:
            self._tokens_per_step.observe(stats.tokens_per_step)

    def on_response(self, endpoint: str, status: int, seconds: float) -> None:
        """An HTTP request has ended; `endpoint` is one of the server's own paths."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def render(self, accept: str) -> tuple[bytes, str]:
        """(text, content type) in the format that a scraper accepts."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


class EngineCollector(Collector):
    """The engine's snapshot as Prometheus metrics."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """The names, for the registry."""
        return _families(EngineSnapshot())

    def collect(self) -> Iterable[Metric]:
        """The figures of now."""
        return _families(self._engine.snapshot())


def _families(now: EngineSnapshot) -> Iterator[Metric]:
    gauges = {
        "queue_length": (now.queued, "Sequences that wait for a slot."),
        "running": (now.running, "Sequences in slots."),
        "slots": (now.slots, "Slots."),
        "pages_used": (now.pages_used, "Cache pages held."),
        "pages": (now.pages_total, "Cache pages."),
        "engine_alive": (int(now.is_alive), "1 while the engine can serve."),
    }
    counters = {
        "steps": (now.steps, "LLM passes over all slots."),
        "prompt_tokens": (now.prompt_tokens, "Prompt tokens."),
        "cached_prompt_tokens": (now.cached_prompt_tokens, "Prompt tokens that a shared prefix spared the LLM."),
        "generated_tokens": (now.generated_tokens, "Tokens committed."),
        "preemptions": (now.preemptions, "Sequences put back because pages ran out."),
        "cancelled": (now.cancelled, "Sequences given up before their end."),
        "failed": (now.failed, "Sequences that a fault ended."),
    }
    for name, (value, text) in gauges.items():
        yield GaugeMetricFamily(f"specinfer_{name}", text, value=value)
    for name, (value, text) in counters.items():
        yield CounterMetricFamily(f"specinfer_{name}", text, value=value)
    yield _histogram("step_seconds", "Wall time of a step.", now.step_seconds)
    for verb, by_position, by_speculator in (
        ("proposed", now.proposed_by_position, now.proposed_by_speculator),
        ("accepted", now.accepted_by_position, now.accepted_by_speculator),
    ):
        yield _labelled(f"{verb}_by_position", f"Steps that {verb} a token at this depth.", "position", by_position)
        yield _labelled(f"{verb}_by_speculator", f"Nodes {verb} of a speculator.", "speculator", by_speculator)


def _labelled(name: str, text: str, label: str, values: Sequence[int] | Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"specinfer_{name}", text, labels=(label,))
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values, 1)
    for key, value in pairs:
        family.add_metric((str(key),), value)
    return family


def _histogram(name: str, text: str, observed: Buckets) -> Metric:
    bounds = [*(str(float(bound)) for bound in observed.bounds), "+Inf"]
    reached = 0
    buckets = []
    for bound, count in zip(bounds, observed.counts, strict=True):
        reached += count
        buckets.append((bound, reached))
    return HistogramMetricFamily(f"specinfer_{name}", text, buckets=buckets, sum_value=observed.total)
