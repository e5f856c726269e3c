"""The openai package, Responses API: streamed, without the server's store, reasoning sent back as encrypted content."""

from __future__ import annotations

import openai
import task

TOOL = {
    "type": "function",
    "name": task.TOOL_NAME,
    "description": task.TOOL_DESCRIPTION,
    "parameters": task.PARAMETERS,
    "strict": False,
}


def ask(client, items, question):
    """One question: steps until an answer is no call."""
    items.append({"role": "user", "content": question})
    for choice in task.CHOICES:
        with client.responses.stream(
            model=task.MODEL,
            instructions=task.SYSTEM,
            input=items,
            tools=[TOOL],
            tool_choice=choice,
            store=False,
            include=["reasoning.encrypted_content"],
            max_output_tokens=task.MAX_TOKENS,
        ) as stream:
            stream.until_done()
            output = stream.get_final_response().output
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in output]
        calls = [item for item in output if item.type == "function_call"]
        if not calls:
            return
        results = {call.call_id: task.forecast(call.arguments) for call in calls}
        items += [{"type": "function_call_output", "call_id": name, "output": text} for name, text in results.items()]


def main():
    """Both questions in one conversation."""
    client = openai.OpenAI(base_url=f"{task.URL}/v1", api_key=task.KEY, max_retries=0)
    items = []
    for question in (task.FIRST, task.SECOND):
        ask(client, items, question)
    task.report()


main()
