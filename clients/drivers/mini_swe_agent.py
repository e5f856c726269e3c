"""mini-swe-agent: its default agent and LiteLLM model, in an environment that runs no command.

It knows one task at a time; a turn without a call is what it answers with a user message of its own.
"""

from __future__ import annotations

import os
import uuid

os.environ["MSWEA_SILENT_STARTUP"] = "1"

import task
from minisweagent.agents.default import DefaultAgent
from minisweagent.models.litellm_model import LitellmModel

STEPS = 6


class ForecastEnvironment:
    """Answers every command with the forecast: what untrained weights write is not for a shell."""

    config = None

    def execute(self, action, cwd="", **_):
        """The result of one command."""
        return {"output": task.forecast(str(action)), "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **_):
        """Nothing for the templates."""
        return {}

    def serialize(self):
        """Nothing to keep."""
        return {}


def main():
    """One task of a few steps."""
    model = LitellmModel(
        model_name=f"openai/{task.MODEL}",
        model_kwargs={
            "api_base": f"{task.URL}/v1",
            "api_key": task.KEY,
            "max_tokens": task.MAX_TOKENS,
            # It leaves a turn without a call out of its history; in a named session the gateway puts it back.
            "extra_headers": {"x-k3-session": str(uuid.uuid4())},
        },
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model, ForecastEnvironment(), system_template=task.SYSTEM, instance_template=task.FIRST, step_limit=STEPS
    )
    ended = agent.run(task.FIRST)
    task.report(exit_status=ended.get("exit_status"), steps=agent.n_calls)


main()
