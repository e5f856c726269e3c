"""LiteLLM's completion function: streamed, the chunks put together by its own builder."""

from __future__ import annotations

import litellm
import task


def ask(messages, question):
    """One question: steps until an answer is no call."""
    messages.append({"role": "user", "content": question})
    for choice in task.CHOICES:
        chunks = litellm.completion(
            model=f"openai/{task.MODEL}",
            api_base=f"{task.URL}/v1",
            api_key=task.KEY,
            messages=messages,
            tools=[task.CHAT_TOOL],
            tool_choice=choice,
            max_tokens=task.MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        message = litellm.stream_chunk_builder(list(chunks), messages=messages).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            text = task.forecast(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def main():
    """Both questions in one conversation."""
    messages = [{"role": "system", "content": task.SYSTEM}]
    for question in (task.FIRST, task.SECOND):
        ask(messages, question)
    task.report()


main()
