"""What gateway and clients tell the cache of the real engine: it is used, and lies cost speed only."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.conftest import two_free_ports
from tests.engine.stack import Engine, Stack, running
from tests.engine.test_prefix_cache import prompt
from tests.gateway.bodies import WEATHER_TOOL, continued, streamed, user
from tests.gateway.pictures import data_url, image_part, picture

STATE_SLOTS = 20
CONFIGURATION = f"""
model: tiny-random
served_name: tiny
device: cpu
cache: k3
kv_tokens: 12288
state_slots: {STATE_SLOTS}
max_running_requests: 3
page_size: 1
chunked_prefill_tokens: 1024
log_level: warning
"""
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.fixture(scope="module")
def hint_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    file: Path = tmp_path_factory.mktemp("hints") / "k3.yaml"
    file.write_text(CONFIGURATION, encoding="utf-8")
    with running(["--config", str(file)], *two_free_ports()) as started:
        yield started


@pytest.fixture
def k3(hint_stack: Stack) -> Iterator[Engine]:
    """The engine with our cache, empty."""
    with Engine.empty(hint_stack.engine_url) as client:
        yield client


@pytest.fixture
def gateway(hint_stack: Stack, k3: Engine) -> Iterator[httpx.Client]:
    """The gateway before an engine with an empty cache."""
    with httpx.Client(base_url=hint_stack.gateway_url, timeout=120, trust_env=False) as client:
        yield client


def words(count: int, seed: int) -> str:
    """Text of so many short words."""
    chooser = random.Random(seed)
    return " ".join(chooser.choice(("wind", "rain", "sun", "snow", "hail", "fog")) for _ in range(count))


def ask(gateway: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A greedy completion of at most 8 tokens that must succeed."""
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    response = gateway.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()


def cached(answer: dict[str, Any]) -> int:
    """Prompt tokens taken from the cache, which both places must agree about."""
    tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer["k3"]["cache"]["cached_tokens"] == tokens
    return tokens


def checkpoints(k3: Engine) -> dict[int, dict[str, Any]]:
    """Checkpoints of a tree without forks, by position."""
    (tree,) = k3.cache("dump")
    return {node["end"]: node["checkpoint"] for node in tree["nodes"] if node["checkpoint"]}


def post(gateway: httpx.Client, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    """The answer of a control route."""
    response = gateway.post(f"/v1/k3/cache/{path}", json=body)
    assert response.status_code == status, response.text
    return response.json()


def system(count: int, seed: int = 0) -> dict[str, Any]:
    return {"role": "system", "content": words(count, seed)}


# --- hints of the gateway ---------------------------------------------------------------------------------------------


def test_the_head_is_shared_by_the_second_session_that_has_it(gateway: httpx.Client, k3: Engine) -> None:
    head = system(300)
    first = ask(gateway, [head, user(words(150, seed=1))], tools=[WEATHER_TOOL], prompt_cache_key="a")
    assert cached(first) == 0
    assert first["k3"]["cache"]["hinted"] is True
    head_len = min(checkpoints(k3))
    assert checkpoints(k3)[head_len]["declared"] is True
    second = ask(gateway, [head, user(words(150, seed=2))], tools=[WEATHER_TOOL], prompt_cache_key="b")
    assert cached(second) == head_len > 300


def test_a_marked_part_is_where_the_next_prompt_goes_on_and_it_is_pinned(gateway: httpx.Client, k3: Engine) -> None:
    for seed in range(4):  # a quarter of what is kept may be pinned
        ask(gateway, [user(words(60, seed))])

    def parts(seed: int) -> list[dict[str, Any]]:
        stable = {"type": "text", "text": words(200, seed=5), **HOUR}
        return [{"role": "user", "content": [stable, {"type": "text", "text": words(80, seed)}]}]

    assert cached(ask(gateway, parts(6))) < 150  # the sentence about the effort, which is in every prompt
    (tree,) = k3.cache("dump")
    (pinned,) = [node for node in tree["nodes"] if node["checkpoint"] and node["checkpoint"]["pinned"]]
    assert cached(ask(gateway, parts(7))) == pinned["end"]


def test_a_marked_picture_counts_as_the_tokens_it_becomes(gateway: httpx.Client, k3: Engine) -> None:
    shown = {**image_part(data_url(picture(300, 260))), **HOUR}

    def look(question: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [shown, {"type": "text", "text": question}]}]

    cold = ask(gateway, look(words(60, seed=2)))
    k3.flush()
    ask(gateway, look(words(60, seed=1)))
    _head, mark, *_behind = sorted(checkpoints(k3))
    warm = ask(gateway, look(words(60, seed=2)))
    assert cached(warm) == mark > 200
    assert warm["choices"] == cold["choices"]


def test_an_instruction_for_one_turn_does_not_cost_the_history(gateway: httpx.Client, k3: Engine) -> None:
    messages = [user(words(400, seed=8))]
    plain = {"tools": [WEATHER_TOOL], "max_tokens": 400}
    answer = ask(gateway, messages, **plain, tool_choice="none")
    _head, history, *_behind = sorted(checkpoints(k3))
    longer = continued({"messages": messages}, answer, user("go on"))["messages"]
    assert cached(ask(gateway, longer, **plain)) == history
    assert 0 < answer["usage"]["prompt_tokens"] - history < 80


def test_a_head_announced_for_a_fan_out_is_kept_though_it_is_short(gateway: httpx.Client, k3: Engine) -> None:
    """Alone, a head of this length does not pay for a pass of its own."""
    short, brief = system(14), {"reasoning_effort": "none"}
    messages = [short, user(words(100, seed=1))]
    ask(gateway, messages, **brief)
    assert len(checkpoints(k3)) == 2
    k3.flush()
    ask(gateway, messages, **brief, k3={"cache": {"fork": 8}})
    head_len, *behind = sorted(checkpoints(k3))
    assert len(behind) == 2
    assert cached(ask(gateway, [short, user(words(100, seed=2))], **brief)) == head_len


def test_why_not_more_was_cached_is_in_the_last_event_of_a_stream_too(gateway: httpx.Client) -> None:
    body = {"model": "tiny", "messages": [user("hello")], "temperature": 0, "max_tokens": 8, "user": "jo"}
    whole = gateway.post("/v1/chat/completions", json=body).json()["k3"]["cache"]
    text = gateway.post("/v1/chat/completions", json=streamed(body)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {")]
    (cache,) = [event["k3"]["cache"] for event in events if "k3" in event]
    assert set(cache) == set(whole) >= {"cached_tokens", "hinted", "session", "why_not_more"}
    assert whole["no_kv_tokens"] == whole["prompt_tokens"] > 0
    assert cache["cached_tokens"] > whole["cached_tokens"] == 0
    assert cache["session"] == "user:jo"


# --- control ----------------------------------------------------------------------------------------------------------


def test_a_session_can_be_released_and_that_may_be_repeated(gateway: httpx.Client, k3: Engine) -> None:
    ask(gateway, [user(words(200, seed=1))], prompt_cache_key="one")
    ask(gateway, [user(words(200, seed=2))], prompt_cache_key="two")
    session = {"session": "prompt_cache_key:one"}
    assert post(gateway, "release", session)["ranks"][0]["released"] > 0
    assert post(gateway, "release", session)["ranks"][0]["released"] == 0
    (tree,) = k3.cache("dump")
    kept = [node["checkpoint"] for node in tree["nodes"] if node["checkpoint"]]
    assert {c["session"] for c in kept if c["released"]} == {"prompt_cache_key:one"}
    assert {c["session"] for c in kept if not c["released"]} == {"prompt_cache_key:two"}
    deleted = gateway.delete("/v1/k3/sessions/prompt_cache_key:two").json()
    assert deleted["ranks"][0]["released"] > 0
    assert gateway.delete("/v1/k3/sessions/prompt_cache_key:two").json()["ranks"][0]["released"] == 0
    (metrics,) = gateway.get("/v1/k3/cache?tree=0").json()["ranks"]
    assert "nodes" not in metrics
    assert gateway.get("/v1/k3/cache").json()["ranks"][0]["nodes"] == k3.cache("dump")[0]["nodes"]


def test_an_abandoned_branch_is_worth_less_and_its_beginning_is_not(gateway: httpx.Client, k3: Engine) -> None:
    ask(gateway, [system(300), user(words(300, seed=3))], k3={"cache": {"session": "s"}})
    before = checkpoints(k3)
    head_len, *behind = sorted(before)
    answer = post(gateway, "abandon", {"session": "session:s", "from": head_len})
    assert answer["ranks"][0]["demoted"] == len(behind) == 2
    after = checkpoints(k3)
    assert after[head_len]["score"] == before[head_len]["score"]
    for position in behind:
        assert after[position]["score"] < before[position]["score"] - 1
        assert after[position]["released"] is False
    assert post(gateway, "abandon", {"session": "session:s", "from": head_len})["ranks"][0]["demoted"] == 0


def test_a_pinned_beginning_outlives_a_crowd_until_its_time_is_over(gateway: httpx.Client, k3: Engine) -> None:
    def crowd(seed: int, now_s: float | None = None) -> None:
        for other in range(STATE_SLOTS + 4):
            hints = {} if now_s is None else {"k3_cache": {"now_s": now_s}}
            k3.generate(prompt(300, seed=seed + other), 2, custom_params=hints)

    pinned, plain = [system(60, seed=1), user(words(20, seed=1))], [system(60, seed=2), user(words(20, seed=2))]
    for seed in range(4):
        k3.generate(prompt(50, seed=900 + seed), 2)
    ask(gateway, plain)
    ask(gateway, pinned)
    unknown = post(gateway, "pin", {"messages": pinned, "tools": [WEATHER_TOOL], "seconds": 60})
    assert unknown["ranks"][0]["reason"] == "not_cached"
    answer = post(gateway, "pin", {"messages": pinned, "seconds": 600})
    (pin,) = answer["ranks"]
    assert pin["pinned"] is True
    assert 0 < pin["position"] <= answer["prompt_tokens"]
    crowd(1000)
    assert cached(ask(gateway, plain)) == 0
    assert cached(ask(gateway, [pinned[0], user("other")])) == pin["position"]
    (now,) = k3.cache("dump")
    assert sum(node["checkpoint"]["pinned"] for node in now["nodes"] if node["checkpoint"]) == 1
    crowd(2000, now_s=1e10)  # the clock of requests is past the pin
    assert cached(ask(gateway, [pinned[0], user("another")])) == 0


def test_commands_that_make_no_sense_are_refused_with_the_field(gateway: httpx.Client, k3: Engine) -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("release", {}, "session"),
        ("release", {"session": "one"}, "session"),
        ("release", {"session": "prompt_cache_key:"}, "session"),
        ("release", {"session": "user:a", "all": True}, "all"),
        ("abandon", {"session": "user:a", "from": -1}, "from"),
        ("abandon", {"session": "user:a", "from": "x"}, "from"),
        ("pin", {"seconds": 5}, "messages"),
        ("pin", {"seconds": 5, "ids": [1], "messages": [user("a")]}, "ids"),
        ("pin", {"seconds": -5, "ids": [1]}, "seconds"),
        ("pin", {"seconds": 1e9, "ids": [1]}, "seconds"),
        ("pin", {"seconds": 5, "ids": ["a"]}, "ids.0"),
        ("pin", {"seconds": 5, "messages": []}, "messages"),
    ]
    for path, body, param in wrong:
        assert post(gateway, path, body, 400)["error"]["param"] == param, body
    assert gateway.delete("/v1/k3/sessions/nobody").status_code == httpx.codes.BAD_REQUEST
    assert gateway.get("/v1/k3/cache?nodes=1").status_code == httpx.codes.BAD_REQUEST
    for name, bad in {"release": {"session": 1}, "abandon": {"session": "a", "from": 1.5}, "pin": {"ids": []}}.items():
        assert k3.http.post(f"/k3/cache/{name}", json=bad).status_code == httpx.codes.BAD_REQUEST


# --- lies -------------------------------------------------------------------------------------------------------------


def hostile(chooser: random.Random, prompt_len: int) -> Any:
    """What a careless or malicious client might send for hints."""

    def position() -> Any:
        return chooser.choice([chooser.randrange(prompt_len + 50), 0, 1 << 30, 1 << 70, -1, 2.5, None])

    honest: dict[str, Any] = {
        "session": chooser.choice(["a", "b", "victim"]),
        "head_len": chooser.randrange(2 * prompt_len),
        "boundaries": [chooser.randrange(2 * prompt_len) for _ in range(chooser.randrange(40))],
        "pins": [[chooser.randrange(2 * prompt_len), chooser.choice([0, 5, 1e6])] for _ in range(5)],
        "now_s": chooser.choice([0, 1e3, 1e11]),
        "wait_s": chooser.choice([0.0, 1e6]),
        "fork": chooser.choice([0, 1, 1 << 30]),
        "release": chooser.random() < 0.5,
        "pin_s": chooser.choice([0, 1e6]),
    }
    chosen = {name: honest[name] for name in chooser.sample(sorted(honest), chooser.randint(1, len(honest)))}
    if chooser.random() < 0.3:
        chosen[chooser.choice(["head_len", "boundaries", "pins", "fork", "session", "x" * 5000])] = position()
    text = json.dumps(chosen)
    return chooser.choice([text, text, text, text[: chooser.randrange(len(text))], "[" * 9000, 7, {"head_len": 3}])


def test_whatever_hints_say_the_tokens_are_those_of_a_cold_run(k3: Engine) -> None:
    chooser = random.Random(11)
    head = prompt(140, seed=1)
    prompts = [head + prompt(chooser.randrange(10, 260), seed=100 + i) for i in range(8)]
    prompts += [ids[: chooser.randrange(60, len(ids))] + prompt(30, seed=200 + i) for i, ids in enumerate(prompts)]
    alone: list[tuple[int, ...]] = []
    for ids in prompts:
        k3.flush()
        alone.append(k3.generate(ids, 10).ids)
    k3.flush()
    (before,) = k3.cache("metrics")
    order = [(chooser.randrange(len(prompts)), hostile(chooser, 250)) for _ in range(80)]

    def hinted(case: tuple[int, Any]) -> tuple[int, ...]:
        index, hints = case
        if chooser.random() < 0.2:
            k3.http.post("/k3/cache/release", json={"session": "victim"})
            k3.http.post("/k3/cache/abandon", json={"session": "a", "from": 1 << 40})
            k3.http.post("/k3/cache/pin", json={"ids": prompts[index], "seconds": 1e6, "now_s": 1e11})
        return k3.generate(prompts[index], 10, custom_params={"k3_cache": hints}).ids

    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(hinted, order))
    assert answers == [alone[index] for index, _ in order]
    (after,) = k3.cache("metrics")
    skipped = [seen["metrics"]["skipped"].get("bad_hint", 0) for seen in (before, after)]
    assert skipped[1] > skipped[0]
    assert after["metrics"]["resynchronised"] == 0
