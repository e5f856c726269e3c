"""The face of a tool that is described by a JSON schema: of a REST operation, of an MCP server's tool."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agent_runtime.tools.result import ToolResult
from agent_runtime.tools.signature import (
    JsonSchema,
    ToolDefinitionError,
    bad_json,
    check_name,
    invalid_arguments,
    json_problem,
)
from k3_sglang.chat.schema_check import schema_problem


@dataclass(frozen=True, slots=True)
class SchemaSignature:
    """Name, description and parameters as somebody else wrote them; arguments are checked against the schema."""

    name: str
    description: str
    parameters: JsonSchema

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.parameters.get("type") != "object":
            raise ToolDefinitionError(
                f"tool {self.name!r}: its parameters have type {self.parameters.get('type')!r}; it must be object"
            )

    def check(self, arguments: str) -> dict[str, Any] | ToolResult:
        """The arguments as JSON values, or the failure the model is told about."""
        problem = json_problem(arguments)
        if problem is not None:
            return bad_json(self, arguments, problem)
        values: dict[str, Any] = json.loads(arguments)
        wrong = schema_problem(values, self.parameters)
        return values if wrong is None else invalid_arguments(self, arguments, [wrong])
