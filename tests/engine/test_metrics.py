"""The dashboard against a scrape of a real run: every metric that a panel asks for is there, with its labels."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.stack import Engine, Stack
from tests.gateway.bodies import chat, continued, streamed

SELECTOR = re.compile(r"\b((?:k3|process)_[a-z0-9_]+)\b(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
LABEL = re.compile(r"\b(\w+)\s*(?:=~|!=|=)")
FROM_PROMETHEUS = {"instance", "le"}
"""Labels that the scraper or the histogram adds."""


def panels(repository: Path) -> dict[str, list[str]]:
    """Queries of the dashboard by the title of their panel."""
    dashboard = json.loads((repository / "deploy" / "grafana" / "k3.json").read_text(encoding="utf-8"))
    found = {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    }
    assert len(found) > 25
    return found


def session(http: httpx.Client, model: str) -> None:
    """Two turns of a conversation, one of them streamed, and a request that is refused."""
    body = chat("Hello", model=model, max_tokens=24, prompt_cache_key="metrics")
    first = http.post("/v1/chat/completions", json=body)
    assert first.status_code == 200, first.text
    second = continued(body, first.json(), {"role": "user", "content": "And now?"})
    assert http.post("/v1/chat/completions", json=streamed(second)).text.rstrip().endswith("[DONE]")
    assert http.post("/v1/chat/completions", json={**body, "n": 1000}).status_code == 400


def families(text: str) -> dict[str, Metric]:
    """Metrics of a scrape by the name of their samples."""
    return {sample.name: family for family in text_string_to_metric_families(text) for sample in family.samples}


def test_every_panel_of_the_dashboard_has_series_after_a_real_run(
    stack: Stack, engine: Engine, repository: Path
) -> None:
    with httpx.Client(base_url=stack.gateway_url, timeout=120, trust_env=False) as http:
        model: str = http.get("/v1/models").json()["data"][0]["id"]
        session(http, model)
        time.sleep(1.1)  # older counters of the cache would do for a scrape
        scraped = families(http.get("/metrics").text)
    known_labels: dict[str, set[str]] = {
        name: {label for sample in family.samples for label in sample.labels} for name, family in scraped.items()
    }
    for title, queries in panels(repository).items():
        for query in queries:
            used = SELECTOR.findall(query)
            assert used, f"{title}: no metric in {query}"
            for name, selector in used:
                assert name in scraped, f"{title}: the gateway has no {name}"
                asked = set(LABEL.findall(selector))
                asked |= {label.strip() for labels in GROUPING.findall(query) for label in labels.split(",")}
                unknown = asked - known_labels[name] - FROM_PROMETHEUS
                assert not unknown, f"{title}: {name} has no label {unknown}"


def test_the_caches_counters_of_a_scrape_are_those_of_the_engine(stack: Stack, engine: Engine) -> None:
    with httpx.Client(base_url=stack.gateway_url, timeout=120, trust_env=False) as http:
        model: str = http.get("/v1/models").json()["data"][0]["id"]
        session(http, model)
        time.sleep(1.1)
        scraped = families(http.get("/metrics").text)
    (told,) = engine.cache("metrics")
    counters: dict[str, Any] = told["metrics"]
    values = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in scraped.values()
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return values[name, frozenset(labels.items())]

    assert value("k3_cache_up") == 1
    assert counters["made"] > 0 and counters["reused"] > 0
    for name in ("made", "reused"):
        assert value(f"k3_cache_checkpoints_{name}_total", dp_rank="0") == counters[name]
    for name in ("prompt_tokens", "cached_tokens", "no_kv_tokens", "no_state_tokens"):
        assert value(f"k3_cache_{name}_total", dp_rank="0") == counters[name]
    for by, count in counters["hits_ended_by"].items():
        assert value("k3_cache_hits_ended_by_total", dp_rank="0", by=by) == count
    assert value("k3_ledger_bytes") > 0 and value("k3_ledger_failing") == 0
