"""The inspector on a gateway: what its pages are made from, and whether they are served."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import Route

from agent_runtime.errors import EngineError
from agent_runtime.gateway.forms import chat_body
from agent_runtime.gateway.job import Gateway
from agent_runtime.gateway.owner import NO_OWNER
from agent_runtime.gateway.settings import is_loopback
from agent_runtime.inspector.content import Contents
from agent_runtime.inspector.layout import Site
from agent_runtime.inspector.routes import Inspected, NoTree, inspector_routes


def inspector(gateway: Gateway) -> list[Route]:
    """The routes; none when the settings say so."""
    settings, record = gateway.settings, gateway.record
    if record.log is None:
        return []
    contents = None
    if settings.inspector_content:
        contents = Contents(record.guard(NO_OWNER), settings.ledger, chat_body, has_ids=gateway.foreign is None)

    async def read_tree() -> Sequence[Mapping[str, Any]]:
        if not gateway.cache.active:
            raise NoTree("The engine is not known to run the checkpoint cache (cache: k3), so there is no tree.")
        try:
            return await gateway.engine.cache_command("dump")
        except EngineError as error:
            raise NoTree(f"The engine did not show its tree: {error}") from error

    return inspector_routes(
        Inspected(
            site=Site(
                settings.model,
                content=settings.inspector_content,
                max_steps=settings.inspector_steps,
                has_ledger=settings.ledger is not None,
            ),
            log=record.log,
            contents=contents,
            tokenizer=gateway.vocabulary,
            read_tree=read_tree,
            # Whoever switched it on meant it to be reached by other names too.
            is_own_host=is_loopback if settings.inspector == "auto" else None,
        )
    )
