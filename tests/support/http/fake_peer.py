"""`python -m tests.support.http.fake_peer PORT SHORT`: a server that streams as many words as it is
asked for, less SHORT."""

import sys

from aiohttp import web

from tests.support.http.fake_server import DONE, piece, usage

SHORT = web.AppKey("short", int)


async def complete(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    tokens = asked["max_tokens"] - request.app[SHORT]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(tokens):
        await response.write(piece(" word"))
    await response.write(usage(len(asked["prompt"]), tokens) + DONE)
    return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake"}]})


if __name__ == "__main__":
    app = web.Application()
    app[SHORT] = int(sys.argv[2])
    app.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]))
