"""`chat`: an agent in the terminal. Every session is a run log that can be gone on with."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time

from rich.console import Console

from agent_runtime.command import agents
from agent_runtime.command.sessions import SUFFIX, add_folder_argument
from agent_runtime.command.terminal import Screen
from agent_runtime.engine.chat_errors import ChatError
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.events import RunResult
from agent_runtime.limits import Limits
from agent_runtime.loop import Agent
from agent_runtime.runstore import FileRunStore
from agent_runtime.tools.plan import Plan
from agent_runtime.tools.threads import call_function


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    agents.add_arguments(parser)
    add_folder_argument(parser)
    parser.add_argument("--session", help="name of a session to go on with or to begin; default: a new one")
    parser.add_argument("--yes", action="store_true", help="run tools that change things without asking")


def run(options: argparse.Namespace) -> int:
    """Chat until the input ends."""
    options.folder.mkdir(parents=True, exist_ok=True)
    name = options.session or time.strftime("%Y%m%d-%H%M%S")
    with FileRunStore(options.folder / f"{name}{SUFFIX}") as store:
        asyncio.run(_chat(options, store, name, Screen(Console(highlight=False))))
    return 0


async def _chat(options: argparse.Namespace, store: FileRunStore, name: str, screen: Screen) -> None:
    plan = Plan()
    registry = agents.registry(options, plan, None)
    asking = {tool for tool in registry.names if (found := registry.get(tool)) is not None and not found.parallel}
    if not options.yes:
        registry.approve_with(screen.approval(asking - {"update_plan"}))
    async with ChatClient(options.base_url, api_key=options.api_key, settings=agents.chat_settings(options)) as client:
        window = options.window or await client.window()
        chosen = agents.agent_options(options, window, plan)
        limits, meter = Limits(max_steps=options.max_steps), agents.meters(options)()
        if store.entries():
            plan.restore(store.entries())
            agent = Agent.resume(client, registry, store, limits=limits, meter=meter, options=chosen)
        else:
            agent = Agent(client, registry, agents.SYSTEM, limits=limits, meter=meter, options=chosen, store=store)
        screen.say(f"session {name}, model {', '.join(await client.models())}, tools: {', '.join(registry.names)}")
        screen.say("Ctrl-C interrupts a run, Ctrl-D ends the chat.")
        await _turns(agent, screen)


async def _turns(agent: Agent, screen: Screen) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: agent.interrupt(now=True))
    if agent.unfinished:
        screen.say("The last run was not finished; going on with it.")
        await _shown(agent, screen, None)
    while True:
        try:
            task = str(await call_function(screen.ask, {}))
        except EOFError:
            return
        if task.strip():
            await _shown(agent, screen, task)


async def _shown(agent: Agent, screen: Screen, task: str | None) -> RunResult | None:
    try:
        if task is None:
            result = await agent.proceed(on_event=screen.show)
        else:
            result = await agent.run(task, on_event=screen.show)
    except ChatError as error:
        screen.say(f"error: {error}")
        return None
    screen.end(result)
    return result
