"""Connections on which a test writes what it likes."""

import asyncio
import json

LARGE = 300_000
UPLOAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def sent_in_pieces(connection: Connection, raw: bytes, pieces: int = 20) -> bytes:
    """All of it sent, however soon the answer came, and then what was answered until the connection ended."""
    reader, writer = connection
    step = len(raw) // pieces + 1
    for at in range(0, len(raw), step):
        writer.write(raw[at : at + step])
        await writer.drain()
        await asyncio.sleep(0.005)
    return await reader.read()


def error_of(answer: bytes) -> tuple[bytes, str]:
    """Status line and the code of the error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body)["error"]["code"]
