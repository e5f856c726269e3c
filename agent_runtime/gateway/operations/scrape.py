"""GET /metrics: what is read when it is asked for, beside the instruments: replay, ledger, the engine's cache."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import anyio
from starlette.requests import Request
from starlette.responses import Response

from agent_runtime.errors import EngineError
from agent_runtime.gateway.cache_link import CacheLink
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.operations.drain import Drain
from agent_runtime.gateway.operations.instruments import Instruments
from agent_runtime.gateway.record import Record
from agent_runtime.guard.counters import total
from agent_runtime.guard.verdict import Moved, Reason, Verdict

if TYPE_CHECKING:
    from prometheus_client import Metric

CACHE_TIMEOUT_S = 1.0
"""How long a scrape waits for the engine's cache, whose counters are read between two of its steps."""
CACHE_FRESH_S = 1.0
"""How long its answer serves further scrapes."""
_TURN_VERDICTS = ("exact", "repaired", "missing", "foreign")
_CACHE_LABELS = {"evicted": "role", "skipped": "reason", "cuts": "reason", "hits_ended_by": "by"}
_OF_CHECKPOINTS = ("made", "reused", "evicted", "dropped_with_kv", "released")


class CacheCounters:
    """The last counters of the engine's cache, one entry for each of its queues."""

    def __init__(self, link: CacheLink) -> None:
        self._link = link
        self._asked_s = float("-inf")
        self._lock = anyio.Lock()
        self.ranks: list[dict[str, Any]] = []
        self.up = False
        """Whether the last question was answered in time."""

    async def refresh(self) -> None:
        """Ask the engine, unless its last answer is fresh; what it said before stays when it does not answer."""
        async with self._lock:
            if time.monotonic() - self._asked_s < CACHE_FRESH_S:
                return
            self.up = False
            if not self._link.active:
                return
            with anyio.move_on_after(CACHE_TIMEOUT_S):
                try:
                    self.ranks = await self._link.counters()
                    self.up = True
                except EngineError:
                    pass  # `up` says so
            self._asked_s = time.monotonic()


class ScrapeRoute:
    """The handler, and the collector it renders."""

    def __init__(self, instruments: Instruments | None, record: Record, link: CacheLink, drain: Drain) -> None:
        self._instruments = instruments
        self._record = record
        self._drain = drain
        self._cache = CacheCounters(link)
        if instruments is not None:
            instruments.registry.register(self)

    async def show(self, request: Request) -> Response:
        """GET /metrics."""
        if self._instruments is None:
            raise ApiError(
                501,
                "Metrics need the package prometheus-client, which is not installed here: "
                "pip install 'prometheus-client>=0.20,<1'.",
                code="metrics_unavailable",
                type="server_error",
            )
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        await self._cache.refresh()
        return Response(generate_latest(self._instruments.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def describe(self) -> Iterable["Metric"]:
        """Nothing is collected when the registry is made: the names are known."""
        return ()

    def collect(self) -> Iterator["Metric"]:
        """Everything that is kept elsewhere."""
        yield from _replay(total(guard.counters.snapshot() for guard in self._record.guards))
        yield from _record(self._record)
        yield _gauge("k3_gateway_draining", "1 while the gateway ends and takes no more work", self._drain.begun)
        yield _gauge("k3_cache_up", "1 when the engine's cache told its counters for this scrape", self._cache.up)
        yield from _cache(self._cache.ranks)


def _replay(counts: Mapping[str, Any]) -> Iterator["Metric"]:
    requests = (*(verdict for verdict in get_args(Verdict)),)
    yield _by("k3_replay_requests", "Requests, by the worst of their turns", "verdict", counts["requests"], requests)
    yield _by("k3_replay_turns", "Assistant turns of histories", "verdict", counts["turns"], _TURN_VERDICTS)
    reasons = get_args(Reason)
    yield _by("k3_replay_odd_turns", "Turns not as generated", "reason", counts["turns_by_reason"], reasons)
    yield _counter("k3_replay_refused_requests", "Requests that strict mode refused", counts["refused_requests"])
    yield _counter("k3_replay_prompts_extended", "Prompts that extend the one before", counts["prompts_extended"])
    moved = get_args(Moved)
    yield _by("k3_replay_prompts_moved", "Prompts that do not, by what moved", "by", counts["prompts_moved"], moved)
    yield _by("k3_replay_lost_tokens", "Tokens of the prompt before that moved", "by", counts["lost_tokens"], moved)


def _record(record: Record) -> Iterator["Metric"]:
    indexes = [guard.index for guard in record.guards]
    yield _gauge("k3_record_turns", "Turns that are known", sum(map(len, indexes)))
    yield _gauge("k3_record_tokens", "Tokens of them, as their bound counts", sum(index.tokens for index in indexes))
    yield _gauge("k3_ledger_bytes", "Bytes of the ledger's files; 0 without one", record.ledger_bytes())
    yield _gauge("k3_ledger_failing", "1 while the ledger cannot be written", record.ledger_failing)


def _cache(ranks: list[dict[str, Any]]) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily

    families: dict[str, CounterMetricFamily] = {}
    for rank in ranks:
        dp_rank = str(rank.get("dp_rank", 0))
        metrics: dict[str, Any] = rank.get("metrics", {})
        for name, value in metrics.items():
            label = _CACHE_LABELS.get(name)
            by: dict[str, Any] = value if label is not None else {"": value}
            if name not in families:
                labels = ("dp_rank",) if label is None else ("dp_rank", label)
                about = f"The engine's checkpoint cache: {name.replace('_', ' ')}"
                full = f"k3_cache_checkpoints_{name}" if name in _OF_CHECKPOINTS else f"k3_cache_{name}"
                families[name] = CounterMetricFamily(full, about, labels=labels)
            for key, count in by.items():
                families[name].add_metric([dp_rank] if label is None else [dp_rank, key], count)
    yield from families.values()


def _by(name: str, about: str, label: str, counts: Mapping[str, int], known: Iterable[str]) -> "Metric":
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, about, labels=(label,))
    for key in known:
        family.add_metric([key], counts.get(key, 0))
    return family


def _counter(name: str, about: str, value: float) -> "Metric":
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name, about, value=value)


def _gauge(name: str, about: str, value: float) -> "Metric":
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, about, value=float(value))
