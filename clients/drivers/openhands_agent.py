"""OpenHands SDK: an agent with one tool of our own in a local conversation, asked twice."""

from __future__ import annotations

import os

os.environ["OPENHANDS_SUPPRESS_BANNER"] = "1"

import task
from openhands.sdk import LLM, Agent, Conversation
from openhands.sdk.tool import Action, Observation, Tool, ToolDefinition, ToolExecutor, register_tool
from pydantic import Field

ITERATIONS = 6


class ForecastAction(Action):
    """Arguments of the tool."""

    city: str = Field(description="Name of the city.")


class ForecastObservation(Observation):
    """Its result."""


class ForecastExecutor(ToolExecutor):
    """Runs it."""

    def __call__(self, action, conversation=None):
        """The forecast."""
        return ForecastObservation.from_text(text=task.forecast(action.city))


class ForecastTool(ToolDefinition[ForecastAction, ForecastObservation]):
    """The tool as OpenHands declares it."""

    @classmethod
    def create(cls, conv_state=None, **params):
        """One instance."""
        return [
            cls(
                description=task.TOOL_DESCRIPTION,
                action_type=ForecastAction,
                observation_type=ForecastObservation,
                executor=ForecastExecutor(),
            )
        ]


def main():
    """Both questions in one conversation; the agent ends a question itself, or the limit does."""
    register_tool("ForecastTool", ForecastTool)
    llm = LLM(
        model=f"openai/{task.MODEL}", base_url=f"{task.URL}/v1", api_key=task.KEY, usage_id="agent", num_retries=0,
        max_output_tokens=task.MAX_TOKENS,
    )  # fmt: skip
    agent = Agent(llm=llm, tools=[Tool(name="ForecastTool")])
    conversation = Conversation(
        agent=agent, workspace=os.getcwd(), visualizer=None, max_iteration_per_run=ITERATIONS, stuck_detection=False
    )
    for question in (task.FIRST, task.SECOND):
        conversation.send_message(question)
        conversation.run()
    task.report(status=str(conversation.state.execution_status))


main()
