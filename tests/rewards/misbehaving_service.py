# SPDX-License-Identifier: Apache-2.0
"""A reward service whose behavior depends on the path of the URL: `python misbehaving_service.py PORT`."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

app = FastAPI()
requests_seen: Counter[str] = Counter()
busy: Counter[str] = Counter()
most_busy: Counter[str] = Counter()


async def drip() -> AsyncIterator[bytes]:
    """An answer that never ends, and never pauses for long."""
    while True:
        await asyncio.sleep(0.05)
        yield b" "


@app.get("/seen/{test}")
async def count(test: str) -> dict[str, int]:
    """Requests of a test, and how many of them at a time."""
    return {"requests": requests_seen[test], "most_busy": most_busy[test]}


@app.post("/{behavior}/{test}")
async def answer(behavior: str, test: str, request: Request) -> Any:
    """The length of each response as its score, unless the behavior is another one."""
    samples = (await request.json())["samples"]
    requests_seen[test] += 1
    scores = [{"score": len(sample["response"]), "prompt_id": sample["prompt_id"]} for sample in samples]
    match behavior.split("-"):
        case ["status", code]:
            return Response("not today", int(code))
        case ["flaky", code, count] if requests_seen[test] <= int(count):
            return Response("try again", int(code))
        case ["text"]:
            return Response("<html>")
        case ["short"]:
            return {"scores": scores[:-1]}
        case ["words"]:
            return {"scores": ["good"] * len(scores)}
        case ["nan"]:
            return Response('{"scores": [NaN]}')
        case ["nested"]:
            return Response("[" * 100_000)
        case ["drip"]:
            return StreamingResponse(drip())
        case ["large"]:
            return StreamingResponse(b" " * (1 << 20) for _ in range(1 << 12))
        case ["user", "token"]:
            is_authorized = request.headers.get("authorization") == "Basic dXNlcjp0b2tlbg=="
            return {"scores": [float(is_authorized)] * len(samples)}
        case ["slow", seconds]:
            busy[test] += 1
            most_busy[test] = max(busy[test], most_busy[test])
            await asyncio.sleep(float(seconds))
            busy[test] -= 1
        case ["echo"]:
            return {
                "scores": [
                    {"score": sample["sample_index"], "level": sample["extra_info"]["level"], "keys": len(sample)}
                    for sample in samples
                ]
            }
    return {"scores": scores}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
