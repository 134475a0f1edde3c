"""An MCP server of the official SDK, as a process of its own: `mcp_server.py PORT [old]`.

`old`: it knows nothing of the protocol's version without sessions, as servers of 2025 do.
"""

import asyncio
import sys
from typing import Literal

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool

NEWEST = (b"mcp-protocol-version", b"2026-07-28")
CALLS = []


def weather(city: Literal["Kyoto", "Rome"]) -> str:
    """The weather in a city"""
    CALLS.append(city)
    return f"sunny in {city}, call {len(CALLS)}"


def thermometer(city: Literal["Kyoto"]) -> str:
    """The temperature in a city"""
    raise ToolError(f"there is no thermometer in {city}")


def view(city: Literal["Kyoto"]) -> list:
    """What a city looks like"""
    return ["green hills", Image(data=b"\x89PNG", format="png")]


async def forecast(city: Literal["Kyoto"]) -> str:
    """The weather of tomorrow"""
    await asyncio.sleep(10)
    return "more of the same"


def secret(city: Literal["Kyoto"]) -> str:
    """Not for everybody"""
    return "a secret"


def tool(function):
    made = Tool.from_function(function, structured_output=False)
    # A model with random weights would never stop inventing arguments.
    made.parameters["additionalProperties"] = False
    return made


def older(app):
    async def without_newest(scope, receive, send):
        if scope["type"] == "http":
            scope = scope | {"headers": [header for header in scope["headers"] if header != NEWEST]}
        await app(scope, receive, send)

    return without_newest


app = MCPServer("sky", tools=[tool(function) for function in (weather, thermometer, view, forecast, secret)]).streamable_http_app()
uvicorn.run(older(app) if "old" in sys.argv else app, host="127.0.0.1", port=int(sys.argv[1]), timeout_graceful_shutdown=1)
