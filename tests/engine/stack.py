"""A real engine and gateway for tests: started by the launcher on free ports, stopped with all their processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

START_TIMEOUT_S = 400
STOP_TIMEOUT_S = 40


@dataclass
class Stack:
    """A running launcher and the addresses of its two servers."""

    process: subprocess.Popen[str]
    engine_port: int
    gateway_port: int
    output: list[str] = field(default_factory=list)
    pump: threading.Thread | None = None
    """Reads the launcher's output; ends after the last process that could write to it."""

    @property
    def engine_url(self) -> str:
        """SGLang's own HTTP server."""
        return f"http://127.0.0.1:{self.engine_port}"

    @property
    def gateway_url(self) -> str:
        """The public server."""
        return f"http://127.0.0.1:{self.gateway_port}"

    def wait_for_output(self, text: str, timeout_s: float = 20.0) -> str:
        """The first line of output that holds ``text``; lines arrive a little after what they tell of.

        Raises:
            AssertionError: no such line came in time; the message holds the last lines.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for line in self.output:
                if text in line:
                    return line
            assert time.monotonic() < deadline, f"no line with {text!r}:\n" + "\n".join(self.output[-40:])
            time.sleep(0.05)


def start(
    arguments: Sequence[str], engine_port: int, gateway_port: int, environment: Mapping[str, str] | None = None
) -> Stack:
    """Start the launcher, with further variables in its environment, and return when it has said ready.

    Raises:
        AssertionError: it ended or stayed silent; the message holds its output.
    """
    command = [sys.executable, "-m", "k3_sglang.launch", *arguments]
    command += ["--port", str(gateway_port), "--engine-port", str(engine_port)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        bufsize=1,
        env={**os.environ, **(environment or {})},
    )
    stack = Stack(process, engine_port, gateway_port)
    lines: queue.Queue[str | None] = queue.Queue()

    def pump() -> None:
        assert process.stdout is not None
        with process.stdout as output:  # ends, and is closed, when the last process that holds the pipe has ended
            for line in output:
                stack.output.append(line.rstrip())
                lines.put(line)
        lines.put(None)

    stack.pump = threading.Thread(target=pump, daemon=True)
    stack.pump.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            stop(stack)
            raise AssertionError("the launcher never said ready:\n" + "\n".join(stack.output[-60:])) from None
        if line is None:
            process.wait(STOP_TIMEOUT_S)
            raise AssertionError("the launcher ended before ready:\n" + "\n".join(stack.output[-60:]))
        if line.startswith("ready"):
            return stack


def stop(stack: Stack) -> int:
    """Interrupt the launcher as Ctrl-C does and wait; kills the whole group if that does not help. Returns its code."""
    with contextlib.suppress(ProcessLookupError):
        stack.process.send_signal(signal.SIGINT)
    try:
        code = stack.process.wait(STOP_TIMEOUT_S)
        if stack.pump is not None:
            stack.pump.join(STOP_TIMEOUT_S)
            assert not stack.pump.is_alive(), "a process of the stack outlived the launcher and holds its output open"
        return code
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(stack.process.pid, signal.SIGKILL)
        stack.process.wait(STOP_TIMEOUT_S)
        raise AssertionError("the launcher did not stop on SIGINT:\n" + "\n".join(stack.output[-40:])) from None


@contextlib.contextmanager
def running(
    arguments: Sequence[str], engine_port: int, gateway_port: int, environment: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """A started stack that is always stopped."""
    stack = start(arguments, engine_port, gateway_port, environment)
    try:
        yield stack
    finally:
        if stack.process.poll() is None:
            stop(stack)


@dataclass(frozen=True)
class Generated:
    """One answer of the engine."""

    ids: tuple[int, ...]
    cached_tokens: int
    prompt_tokens: int
    finish: str
    why_not_more: str | None
    """Why no more was reused, with our cache."""


class Engine:
    """The few calls tests make to SGLang's HTTP server."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def __enter__(self) -> Self:
        self.http.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    @classmethod
    @contextlib.contextmanager
    def empty(cls, url: str) -> Iterator[Self]:
        """The engine with an empty cache; afterwards index, tree and pools agree, whatever a test did."""
        with cls(url) as client:
            client.flush()
            yield client
            client.wait_idle()
            (checked,) = client.cache("check")
            assert checked["problems"] == []
            client.flush()

    def generate(
        self, ids: Sequence[int], max_new_tokens: int = 16, images: Sequence[str] = (), **sampling: object
    ) -> Generated:
        """Greedy continuation unless ``sampling`` says otherwise; runs to the token limit. ``images`` are data URLs."""
        parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}
        body = {"input_ids": list(ids), "sampling_params": parameters, **_image_data(images)}
        response = self.http.post("/generate", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        return _generated(response.json())

    def stream(
        self, ids: Sequence[int], max_new_tokens: int, begun: threading.Event, **sampling: object
    ) -> tuple[int, ...]:
        """:meth:`generate`, streamed: sets ``begun`` when the first token is there. Returns the output ids."""
        parameters = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}
        output: list[int] = []
        body = {"input_ids": list(ids), "sampling_params": parameters, "stream": True}
        with self.http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == httpx.codes.OK, response.read()
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if data and data != "[DONE]":
                    output += json.loads(data)["output_ids"]
                    begun.set()
        return tuple(output)

    def prompt_logprobs(self, ids: Sequence[int], images: Sequence[str] = ()) -> list[float]:
        """Log-probability of each prompt token but the first, computed without any cached prefix.

        Those of a picture's tokens mean nothing: in their place the engine reports those of token 0 or the last one.
        """
        response = self.http.post(
            "/generate",
            json={
                "input_ids": list(ids),
                "return_logprob": True,
                "logprob_start_len": 0,
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                **_image_data(images),
            },
        )
        assert response.status_code == httpx.codes.OK, response.text
        return [row[0] for row in response.json()["meta_info"]["input_token_logprobs"]][1:]

    def flush(self) -> None:
        """Empty the prefix cache; the engine refuses while anything runs, so wait for that."""
        deadline = time.monotonic() + 30
        while self.http.post("/flush_cache").status_code != httpx.codes.OK:
            assert time.monotonic() < deadline, "the engine never became idle"
            time.sleep(0.05)

    def cache(self, command: str) -> list[dict[str, Any]]:
        """What each rank's cache answers to a command that changes nothing."""
        response = self.http.get(f"/k3/cache/{command}")
        assert response.status_code == httpx.codes.OK, response.text
        return response.json()["ranks"]

    def update_weights(self, checkpoint: Path) -> tuple[int, str]:
        """Replace the weights by those of another checkpoint; returns the HTTP status and SGLang's message."""
        body = {"model_path": str(checkpoint), "load_format": "auto"}
        response = self.http.post("/update_weights_from_disk", json=body)
        return response.status_code, str(response.json()["message"])

    def load(self) -> dict[str, int]:
        """Running and waiting requests and tokens held by running requests."""
        state = self.http.get("/v1/loads").json()["loads"][0]
        return {key: state[key] for key in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}

    def wait_idle(self) -> None:
        """Poll until nothing runs or waits and no token is held; the figures lag behind by a few steps."""
        deadline = time.monotonic() + 30
        while any((load := self.load()).values()):
            assert time.monotonic() < deadline, f"the engine never became idle: {load}"
            time.sleep(0.05)


def _image_data(images: Sequence[str]) -> dict[str, object]:
    return {"image_data": list(images)} if images else {}


def _generated(body: dict[str, object]) -> Generated:
    meta = body["meta_info"]
    assert isinstance(meta, dict)
    return Generated(
        ids=tuple(body["output_ids"]),  # type: ignore[arg-type]
        cached_tokens=meta["cached_tokens"],
        prompt_tokens=meta["prompt_tokens"],
        finish=meta["finish_reason"]["type"],
        why_not_more=meta["k3_cache"][0]["why_not_more"] if "k3_cache" in meta else None,
    )


def configuration(repository: Path) -> list[str]:
    """Launcher arguments of the tiny model."""
    config = str(repository / "configs" / "tiny.yaml")
    return ["--config", config, "--model", "tiny-random", "--served-name", "tiny"]
