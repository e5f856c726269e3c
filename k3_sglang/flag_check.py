"""Asks SGLang whether it takes argument lists, in a process of its own: its parser, its rules as on a named machine.

``python -m k3_sglang.flag_check`` reads a JSON list of tasks from standard input and writes a JSON list of answers.
A task is ``{"arguments": [...], "machine": {...} or null, "memory_mib": N or null, "environment": {...}}``. ``machine``
is what SGLang would find out about a GPU (``is_sm100``, ``device_sm``, ...); its rules then resolve the arguments as
there, without a GPU. What only a GPU or a download can tell is not asked. An answer is ``{"error": text or null,
"resolved": {...}}``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

RESOLVED = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "ep_size",
    "page_size",
    "mem_fraction_static",
    "mamba_full_memory_ratio",
    "max_mamba_cache_size",
    "mamba_radix_cache_strategy",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "chunked_prefill_size",
    "max_running_requests",
    "kv_cache_dtype",
)
"""What an answer tells of the resolved arguments."""


def check(task: Mapping[str, Any]) -> dict[str, Any]:
    """One answer."""
    from k3_sglang import compat

    told = io.StringIO()
    try:
        with _as_on(task), contextlib.redirect_stderr(told):
            arguments = compat.prepare_server_args([str(word) for word in task["arguments"]])
            arguments.resolve_once()
            view = compat.resolved_view(arguments)
            resolved = {name: _plain(getattr(view, name)) for name in RESOLVED}
            arguments.check_server_args()
    except SystemExit:  # argparse has said what it does not take
        lines = told.getvalue().strip().splitlines() or ["the parser ended without a word"]
        return {"error": lines[-1], "resolved": {}}
    except Exception as error:
        text = " ".join(str(error).split()) or "a check failed without a message"
        return {"error": f"{type(error).__name__}: {text}", "resolved": {}}
    return {"error": None, "resolved": resolved}


@contextlib.contextmanager
def _as_on(task: Mapping[str, Any]) -> Iterator[None]:
    """SGLang takes this process for one on the task's machine; the environment is as before afterwards."""
    from k3_sglang import compat

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, task.get("environment") or {}))
        if task.get("machine"):
            stack.enter_context(compat.override_platform(**task["machine"]))
            memory = task.get("memory_mib")
            stack.enter_context(
                mock.patch.object(compat.memory_hook, "get_device_memory_capacity", lambda device=None: memory)
            )
        yield


def _plain(value: object) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def main() -> None:
    """Read tasks, write answers; SGLang's own output goes to standard error."""
    tasks = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        from k3_sglang import compat

        compat.load_plugins()
        logging.disable(logging.CRITICAL)
        answers = [check(task) for task in tasks]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
