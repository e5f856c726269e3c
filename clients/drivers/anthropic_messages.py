"""The anthropic package: streamed messages, blocks sent back as they came."""

from __future__ import annotations

import anthropic
import task

TOOL = {"name": task.TOOL_NAME, "description": task.TOOL_DESCRIPTION, "input_schema": task.PARAMETERS}
CHOICES = {"required": "any", "auto": "auto", "none": "none"}


def ask(client, messages, question):
    """One question: steps until an answer is no call."""
    content = [{"type": "text", "text": question}]
    for choice in task.CHOICES:
        messages.append({"role": "user", "content": content})
        with client.messages.stream(
            model=task.MODEL,
            system=task.SYSTEM,
            messages=messages,
            tools=[TOOL],
            tool_choice={"type": CHOICES[choice]},
            max_tokens=task.MAX_TOKENS,
        ) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            return
        results = {use.id: task.forecast(str(use.input)) for use in uses}
        content = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in results.items()]


def main():
    """Both questions in one conversation."""
    client = anthropic.Anthropic(base_url=task.URL, api_key=task.KEY, max_retries=0)
    messages = []
    for question in (task.FIRST, task.SECOND):
        ask(client, messages, question)
    task.report()


main()
