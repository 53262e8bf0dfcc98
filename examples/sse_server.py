"""A chat endpoint with server-sent events; when the client goes away, generation stops.

python examples/sse_server.py MODEL [PORT]
curl -N localhost:8000/chat -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
"""

import contextlib
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from asyncllm import AsyncLLM


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with AsyncLLM(sys.argv[1]) as app.state.llm:
        yield


async def chat(request: Request) -> Response:
    try:
        body = await request.json()
        stream = request.app.state.llm.chat(body.get("messages", []), max_tokens=body.get("max_tokens", 256))
    except ValueError as error:  # no JSON, or a RequestError: a bad request is known before anything is sent
        return JSONResponse({"error": str(error)}, status_code=400)

    async def events() -> AsyncIterator[str]:
        async with stream:  # a client that goes away cancels this task, and leaving the block aborts the request
            async for token in stream:
                event = {"channel": token.channel, "text": token.text, "finish_reason": token.finish_reason}
                yield f"data: {json.dumps(event)}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def stats(request: Request) -> Response:
    now = await request.app.state.llm.stats()
    return JSONResponse({"running": now.num_running, "waiting": now.num_waiting, "generated": now.num_generated_tokens})


app = Starlette(routes=[Route("/chat", chat, methods=["POST"]), Route("/stats", stats)], lifespan=lifespan)

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    uvicorn.run(app, port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000, log_level="warning")
