"""Speed of the tiny model through the real engine and gateway on a CPU, beside the same weights without an engine.

    python benchmarks/engine_cpu.py                 # starts its own server, about two minutes
    python benchmarks/engine_cpu.py --json out.json

Figures, each the median of several repetitions taken in turn:

- decode tokens/s at batch 1 and 8: greedy streams through SGLang's /generate, counted after every stream's first token.
- prefill tokens/s at 512 and 4096 tokens: time to one token of a prompt the cache has never seen.
- gateway overhead: one chat completion through the gateway minus the same ids and the same grammar sent straight to the
  engine, measured alternately.
- reference: the same checkpoint decoded by the plain PyTorch module in this process at batch 1, the named baseline.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.table import Table

from k3_sglang.chat.encode import encode
from k3_sglang.chat.grammar import constraint
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.reference.model import ReferenceModel
from k3_sglang.tiny.checkpoint import ensure
from k3_sglang.tiny.trained import RANDOM, TRAINED, trained

REPOSITORY = Path(__file__).resolve().parent.parent
VOCABULARY = 1024
"""Ordinary token ids that both tiny models have."""

DECODE_TOKENS = 256
REPETITIONS = 5
GATEWAY_REQUESTS = 20
GATEWAY_NEW_TOKENS = 8


@dataclass(frozen=True)
class Figure:
    """One measured quantity."""

    name: str
    value: float
    unit: str
    lowest: float
    highest: float


def figure(name: str, unit: str, samples: Sequence[float]) -> Figure:
    """Median with the extremes beside it."""
    return Figure(name, statistics.median(samples), unit, min(samples), max(samples))


def random_ids(length: int, source: random.Random) -> list[int]:
    """A prompt no cache has seen."""
    return source.choices(range(VOCABULARY), k=length)


def stream_times(engine: httpx.Client, ids: Sequence[int]) -> list[float]:
    """Arrival time of each token of one greedy stream."""
    body = {
        "input_ids": list(ids),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": DECODE_TOKENS, "ignore_eos": True},
    }
    times = []
    with engine.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


def decode_rate(engine: httpx.Client, batch: int, source: random.Random) -> float:
    """Tokens per second of ``batch`` simultaneous streams while all of them are decoding."""
    prompts = [random_ids(16, source) for _ in range(batch)]
    with ThreadPoolExecutor(batch) as pool:
        streams = list(pool.map(lambda ids: stream_times(engine, ids), prompts))
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    return sum(start < moment <= end for times in streams for moment in times) / (end - start)


def prefill_rate(engine: httpx.Client, length: int, source: random.Random) -> float:
    """Prompt tokens per second of one fresh prompt, the HTTP request and the first token included."""
    body = {"input_ids": random_ids(length, source), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    start = time.perf_counter()
    answer = engine.post("/generate", json=body).json()
    seconds = time.perf_counter() - start
    assert answer["meta_info"]["cached_tokens"] == 0
    return length / seconds


def gateway_overhead_ms(engine: httpx.Client, gateway: httpx.Client, model: str, tokenizer: K3Tokenizer) -> float:
    """Milliseconds a chat completion takes longer than its own engine request: difference of medians, taken in turn."""
    direct, through = [], []
    for number in range(GATEWAY_REQUESTS):
        messages = [{"role": "user", "content": f"Question {number}: how do you do?"}]
        request = parse_request({"messages": messages})
        prompt = encode(request, tokenizer)
        sampling = {
            "temperature": 0,
            "max_new_tokens": GATEWAY_NEW_TOKENS,
            "stop_token_ids": [tokenizer.special.end_of_msg],
            "skip_special_tokens": False,
            **(constraint(request, prompt.start, force=model == RANDOM) or {}),
        }
        direct_body = {"input_ids": list(prompt.ids), "sampling_params": sampling}
        chat_body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": GATEWAY_NEW_TOKENS}
        engine.post("/generate", json=direct_body).raise_for_status()  # both measured calls hit the same prefix
        direct.append(timed(engine, "/generate", direct_body))
        through.append(timed(gateway, "/v1/chat/completions", chat_body))
    return (statistics.median(through) - statistics.median(direct)) * 1e3


def timed(client: httpx.Client, path: str, body: dict[str, object]) -> float:
    """Seconds of one POST."""
    start = time.perf_counter()
    client.post(path, json=body).raise_for_status()
    return time.perf_counter() - start


def reference_rate(model: ReferenceModel, source: random.Random) -> float:
    """Tokens per second of the plain module at batch 1, first token excluded."""
    state = model.new_state()
    model.greedy(random_ids(16, source), 1, state)
    token = 1
    start = time.perf_counter()
    for _ in range(DECODE_TOKENS):
        token = int(model([token], state)[-1].argmax())
    return DECODE_TOKENS / (time.perf_counter() - start)


def measure(engine_url: str, gateway_url: str, checkpoint: Path) -> list[Figure]:
    """All figures, the repetitions of each taken in turn with those of the others."""
    source = random.Random(time.time_ns())
    reference = ReferenceModel.from_dir(checkpoint)
    torch.set_num_threads(1)  # one-token steps are fastest on one thread, as in the engine
    samples: dict[str, list[float]] = {}
    with (
        httpx.Client(base_url=engine_url, timeout=300, trust_env=False) as engine,
        httpx.Client(base_url=gateway_url, timeout=300, trust_env=False) as gateway,
    ):
        for repetition in range(REPETITIONS + 1):
            taken = {
                "decode, batch 1": decode_rate(engine, 1, source),
                "reference module, batch 1": reference_rate(reference, source),
                "decode, batch 8": decode_rate(engine, 8, source),
                "prefill, 512 tokens": prefill_rate(engine, 512, source),
                "prefill, 4096 tokens": prefill_rate(engine, 4096, source),
            }
            if repetition:  # the first round warms up
                for name, value in taken.items():
                    samples.setdefault(name, []).append(value)
        model = gateway.get("/v1/models").json()["data"][0]["id"]
        tokenizer = K3Tokenizer.from_dir(checkpoint)
        overhead = [gateway_overhead_ms(engine, gateway, model, tokenizer) for _ in range(REPETITIONS)]
    ratios = [a / b for a, b in zip(samples["decode, batch 1"], samples["reference module, batch 1"], strict=True)]
    return [
        *(figure(name, "tokens/s", values) for name, values in samples.items()),
        figure("engine / reference module, batch 1", "ratio", ratios),
        figure("gateway overhead per request", "ms", overhead),
    ]


def start_server(model: str) -> tuple[subprocess.Popen[str], str, str]:
    """The launcher with the tiny model on free ports; returns it with engine and gateway addresses."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    command = [sys.executable, "-m", "k3_sglang.launch", "--config", str(REPOSITORY / "configs" / "tiny.yaml")]
    command += ["--model", model]
    command += ["--engine-port", str(ports[0]), "--port", str(ports[1])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            return process, f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    raise SystemExit("the server ended before it was ready; its messages are above")


def show(figures: Sequence[Figure]) -> None:
    """Print the table."""
    table = Table(title="tiny K3 on a CPU")
    for column in ("figure", "median", "lowest", "highest", "unit"):
        table.add_column(column, justify="left" if column in ("figure", "unit") else "right")
    for row in figures:
        table.add_row(row.name, f"{row.value:,.2f}", f"{row.lowest:,.2f}", f"{row.highest:,.2f}", row.unit)
    Console().print(table)


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--model", choices=(TRAINED, RANDOM), default=TRAINED, help="trained or untrained weights")
    arguments = parser.parse_args()
    checkpoint = trained() if arguments.model == TRAINED else ensure()
    process, engine_url, gateway_url = start_server(arguments.model)
    try:
        figures = measure(engine_url, gateway_url, checkpoint)
    finally:
        process.terminate()
        process.wait(60)
    show(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in figures], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
