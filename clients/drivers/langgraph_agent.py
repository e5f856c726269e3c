"""LangGraph's graph of model and tools around ChatOpenAI, with a checkpointer that keeps the thread; streams."""

from __future__ import annotations

import contextlib

import task
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

STEPS = 17


def graph():
    """The usual loop: the model, its tools, the model again."""
    model = ChatOpenAI(
        model=task.MODEL, base_url=f"{task.URL}/v1", api_key=task.KEY, max_tokens=task.MAX_TOKENS, streaming=True,
        stream_usage=True, max_retries=0,
    )  # fmt: skip
    asked = model.bind_tools([task.forecast])

    def agent(state: MessagesState):
        return {"messages": [asked.invoke([SystemMessage(task.SYSTEM), *state["messages"]])]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode([task.forecast]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return builder.compile(checkpointer=InMemorySaver())


def main():
    """Both questions in one thread."""
    app = graph()
    config = {"configurable": {"thread_id": "weather"}, "recursion_limit": STEPS}
    for question in (task.FIRST, task.SECOND):
        with contextlib.suppress(GraphRecursionError):  # the thread keeps what there was
            app.invoke({"messages": [HumanMessage(question)]}, config)
    task.report()


main()
