"""SGLang's real cache under the re-enacted engine loop: hand-computed hits, conservation, and the command line."""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cache.replay.sessions import encoded

PROGRAM = Path(__file__).with_name("real_cache.py")
OURS = ("k3", "k3:hints") if importlib.util.find_spec("k3_sglang.cache.factory") else ()
POLICIES = ("", "cap=1", "interval=64", "no_buffer", "by-name", "kv-only", *OURS)


def run_jobs(repository: Path, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of the program, one per job."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps({"jobs": list(jobs)})],
        cwd=repository, capture_output=True, text=True, timeout=600, env=_environment(repository),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _environment(repository: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(repository)}


def growing_prompts(lengths: Sequence[int]) -> tuple[list[range], list[int]]:
    """Blocks and partial tails of prompts of these lengths, each a prefix of the next."""
    return [range(length // 64) for length in lengths], [length % 64 for length in lengths]


def random_sessions(seed: int, count: int) -> list[dict[str, Any]]:
    """Sessions that grow, lose their reasoning, edit their history and start over."""
    chance = random.Random(seed)
    lines = []
    for number in range(count):
        prompts, outputs, fresh = [list(range(12))], [], 1000
        for _ in range(chance.randrange(2, 7)):
            kept = prompts[-1][: chance.choice([len(prompts[-1]), len(prompts[-1]), 15, 8])]
            grown = chance.randrange(1, 12)
            prompts.append([*kept, *range(fresh, fresh + grown)])
            fresh += grown
        outputs = [chance.randrange(1, 700) for _ in prompts]
        tails = [chance.randrange(64) for _ in prompts]
        lines.append(encoded(str(number), prompts, tails, outputs=outputs) | {"tool_tokens": 512, "system_tokens": 0})
    return lines


@pytest.fixture(scope="module")
def results(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All jobs of this file in one program, because importing SGLang takes most of its time."""
    folder = tmp_path_factory.mktemp("traces")

    def trace(name: str, lines: Sequence[dict[str, Any]]) -> str:
        path = folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return str(path)

    prompts, tails = growing_prompts([300, 540, 680, 1010])
    short = trace("short", [encoded("short", prompts, tails, outputs=[40, 40, 300, 40])])
    long = trace("long", [encoded("long", [range(100), range(110)], [0, 0], outputs=[1, 1])])
    mixed = trace("mixed", random_sessions(7, 12))
    busy = trace("busy", random_sessions(11, 30))
    exact = {"states": 60, "kv_tokens": 20_000, "grain": 1, "chunk": 64}
    tight = {"states": 12, "kv_tokens": 9_000, "chunk": 512, "concurrent": 4}
    jobs: dict[str, list[dict[str, Any]]] = {
        "short": [{"policy": name, "trace": short, **exact} for name in POLICIES],
        "long": [{"policy": "", "trace": long, "states": 60, "kv_tokens": 20_000, "chunk": 2048}],
        "ample": [
            {"policy": name, "trace": mixed, "states": 400, "kv_tokens": 200_000, "chunk": 512, "concurrent": 4}
            for name in POLICIES
        ],
        "tight": [
            {"policy": name, "trace": mixed, **tight, "serial": serial} for name in POLICIES for serial in (True, False)
        ],
        "paged": [
            {"policy": name, "trace": mixed, **tight, "kv_tokens": 12_800, "page": 128, "grain": grain}
            for name in ("", "kv-only", *OURS)
            for grain in (1, 64)
        ],
        "busy": [
            {"policy": name, "trace": busy, **tight, "concurrent": 6, "serial": False}
            for name in ("", "cap=2", "cap=1,no_buffer", *OURS)
        ],
        "fine": [{"policy": name, "trace": mixed, **tight, "grain": 1, "serial": False} for name in POLICIES],
    }
    answers = iter(run_jobs(repository, [job for group in jobs.values() for job in group]))
    return {name: [{**job, **next(answers)} for job in group] for name, group in jobs.items()}


pytestmark = pytest.mark.timeout(650)


def test_a_short_session_hits_where_the_engine_takes_snapshots(results: dict[str, list[dict[str, Any]]]) -> None:
    hits = {job["policy"]: job["hits"] for job in results["short"]}
    # Chunks of 64 keep a state at every multiple of 64 of what is computed; decode crosses 768 once, from 680 to 979.
    assert hits[""] == [0, 256, 512, 768]
    # Interval 64: the last multiple of 64 inside each answer.
    assert hits["interval=64"] == [0, 320, 576, 960]
    # Exact ends: prompt and all answer tokens that have KV.
    for policy in ("no_buffer", "by-name", "kv-only", *OURS):
        assert hits[policy] == [0, 339, 579, 979], policy


def test_a_long_prefill_counts_its_chunks(results: dict[str, list[dict[str, Any]]]) -> None:
    (job,) = results["long"]
    assert job["passes"] == [4, 1]
    assert job["hits"] == [0, 6400]


@pytest.mark.parametrize("group", ["short", "long", "ample", "tight", "paged", "fine"])
def test_every_prompt_token_is_hit_or_computed_and_the_pools_come_back(
    results: dict[str, list[dict[str, Any]]], group: str
) -> None:
    for job in results[group]:
        for hit, kv_hit, prompt in zip(job["hits"], job["kv_hits"], job["prompts"], strict=True):
            assert 0 <= hit <= kv_hit <= prompt - 1, job["policy"]
        page = max(job.get("page", 1), job.get("grain", 64))
        assert job["kv_left"] == job["kv_tokens"] // page * page, job["policy"]
        assert job["states_left"] == job["states"], job["policy"]


@pytest.mark.parametrize("group", ["short", "ample", "tight", "fine"])
def test_nobody_beats_the_bound(results: dict[str, list[dict[str, Any]]], group: str) -> None:
    for job in results[group]:
        if job["policy"] != "kv-only":
            computed = sum(job["prompts"]) - sum(job["hits"])
            assert job["bound"] <= computed + 1e-6, job["policy"]


def test_with_ample_memory_nobody_beats_the_cache_that_needs_no_states(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    hits = {job["policy"]: job["hits"] for job in results["ample"]}
    for policy in POLICIES:
        assert all(hit <= best for hit, best in zip(hits[policy], hits["kv-only"], strict=True)), policy
    assert sum(hits[""]) < sum(hits["no_buffer"])


def test_a_component_given_by_name_behaves_as_the_same_one_built_in(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for group in ("short", "ample", "tight", "fine"):
        by_policy: dict[str, list[list[int]]] = {}
        for job in results[group]:
            by_policy.setdefault(job["policy"], []).append(job["hits"])
        assert by_policy["by-name"] == by_policy["no_buffer"]


@pytest.mark.parametrize("group", ["short", "long", "ample", "tight", "fine", "busy"])
def test_the_light_trees_hit_what_the_real_caches_hit(results: dict[str, list[dict[str, Any]]], group: str) -> None:
    compared = [job for job in results[group] if job["light"] is not None]
    assert compared
    for job in compared:
        assert job["light"] == job["hits"], (job["policy"], job.get("serial"))


def test_pages_allow_hits_at_multiples_of_their_size_only(results: dict[str, list[dict[str, Any]]]) -> None:
    assert all(hit % 128 == 0 for job in results["paged"] for hit in job["hits"])
    assert any(hit for job in results["paged"] for hit in job["hits"])


def cli(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "k3_sglang.cache.replay", *arguments],
        cwd=repository, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """A few random sessions."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in random_sessions(3, 6)), encoding="utf-8")
    return path


def test_the_command_line_prints_a_table_and_writes_json(repository: Path, trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    names = "kv-only,upstream,upstream:cap=2,no_buffer,upstream-best,tokenspeed:divided,marconi,bound"
    done = cli(
        repository, str(trace_file), "--policies", names, "--states", "12,20", "--kv-tokens", "20000",
        "--concurrent", "2", "--chunk", "512", "--search-caps", "1,2", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 open sessions, 20 state slots, 20,000 KV tokens" in done.stdout
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["complete"] and report["settings"]["seed"] == 1
    assert [cell["budget"]["states"] for cell in report["cells"]] == [12, 20]
    for cell in report["cells"]:
        rows = {row["policy"]: row for row in cell["rows"]}
        assert list(rows) == [
            "kv-only", "upstream", "upstream:cap=2,no_buffer", "upstream-best", "tokenspeed:divided", "marconi", "bound"
        ]  # fmt: skip
        for row in cell["rows"]:
            assert row["hit_tokens"] + row["computed_tokens"] == pytest.approx(row["prompt_tokens"])
        assert rows["upstream-best"]["computed_tokens"] <= rows["upstream"]["computed_tokens"]
        assert rows["upstream"]["flops"] > rows["kv-only"]["flops"] > 0
        assert rows["upstream"]["first_token"]["p95"] >= rows["upstream"]["first_token"]["p50"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--states", "9", "--policies", "lru"), "policy 'lru' is unknown"),
        (("--states", "9", "--policies", "upstream:cap=0"), "'cap=0' is not a flag; allowed: cap=N"),
        (("--states", "9", "--policies", "component:nowhere:Thing"), "cannot be loaded"),
        (("--states", "0"), "invalid _numbers value: '0'"),
        ((), "say how many state slots there are"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(
    repository: Path, trace_file: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = cli(repository, str(trace_file), *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_pool_too_small_for_a_request_is_one_line(repository: Path, trace_file: Path) -> None:
    done = cli(repository, str(trace_file), "--states", "9", "--kv-tokens", "640", "--policies", "tokenspeed:divided")
    assert done.returncode == 2
    assert "does not fit" in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_help_shows_examples_and_policies(repository: Path) -> None:
    done = cli(repository, "--help")
    assert done.returncode == 0
    assert "--states-per-session 3,6,9" in done.stdout and "bound-one-pool" in done.stdout


def test_an_interrupt_keeps_what_is_finished(repository: Path, trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    # Enough cells that the interrupt arrives while one is running.
    states = ",".join(str(count) for count in range(10, 4000))
    command = [sys.executable, "-u", "-m", "k3_sglang.cache.replay", str(trace_file), "--states", states]
    command += ["--policies", "tokenspeed,bound", "--kv-tokens", "20000", "--json", str(out)]
    with subprocess.Popen(
        command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "state slots" in line:
                    process.send_signal(signal.SIGINT)
                    break
            rest, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, errors[-2000:]
    assert "stopped; what was finished is above" in rest and "Traceback" not in errors
    report = json.loads(out.read_text(encoding="utf-8"))
    assert not report["complete"] and report["cells"][0]["rows"]
