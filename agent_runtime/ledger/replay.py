"""Goes through a ledger without a model: what was received and what the engine was sent, byte for byte."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from agent_runtime.engine.sglang import generate_body, json_bytes
from agent_runtime.errors import LedgerError
from agent_runtime.ledger.reading import LedgerReader, StoredStep


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step put together again: the body as received, and what was sent to the engine, one body for each choice.

    ``engine`` is empty for a prompt with images: their data is in ``body``, or where its URLs lead.
    """

    step: StoredStep
    body: bytes
    ids: tuple[int, ...]
    engine: tuple[bytes, ...]


def replayed_steps(reader: LedgerReader, session: int | None = None) -> Iterator[Replayed]:
    """The steps of a session, or of all, in the order in which they came. Raises LedgerError for a damaged one."""
    for step in reader.steps(session):
        ids = reader.prompt_ids(step.id)
        asked: list[dict[str, Any]] = [] if step.facts.get("images") else step.facts["engine"]
        engine = tuple(json_bytes(generate_body(ids, one["sampling_params"], one["rid"])) for one in asked)
        yield Replayed(step, reader.body(step.id), ids, engine)


def received(step: Replayed, path: object) -> dict[str, Any]:
    """The JSON object that a client sent. Raises LedgerError when the body is none."""
    return received_object(step.body, step.step.id, path)


def received_object(body: bytes, step: int, path: object) -> dict[str, Any]:
    """The object of a step's body. Raises LedgerError when the body is none."""
    value: Any = json.loads(body.decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise LedgerError(f"step {step} of ledger {path} has a body that is no JSON object")
    return cast("dict[str, Any]", value)
