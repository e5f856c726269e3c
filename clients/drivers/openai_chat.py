"""The openai package, chat completions: whole answers, or with ``stream`` the package's own stream helper."""

from __future__ import annotations

import sys

import openai
import task


def complete(client, messages, choice, streamed):
    """One assistant message, as the package's object."""
    asked = {
        "model": task.MODEL,
        "messages": messages,
        "tools": [task.CHAT_TOOL],
        "tool_choice": choice,
        "max_tokens": task.MAX_TOKENS,
    }
    if not streamed:
        return client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        stream.until_done()
        return stream.get_final_completion().choices[0].message


def ask(client, messages, question, streamed):
    """One question: steps until an answer is no call."""
    messages.append({"role": "user", "content": question})
    for choice in task.CHOICES:
        message = complete(client, messages, choice, streamed)
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            text = task.forecast(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def main():
    """Both questions in one conversation."""
    streamed = "stream" in sys.argv[1:]
    client = openai.OpenAI(base_url=f"{task.URL}/v1", api_key=task.KEY, max_retries=0)
    messages = [{"role": "system", "content": task.SYSTEM}]
    for question in (task.FIRST, task.SECOND):
        ask(client, messages, question, streamed)
    task.report()


main()
