# SPDX-License-Identifier: Apache-2.0
"""The Tinker API over HTTP: keys, limits of bodies, and paths.

A permanent mistake is answered with 400, 404 or 422, which the client raises at once; it repeats a request after 408,
409, 429 and 5xx. Requests that ranks run are answered with a promise, which `retrieve_future` waits for.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from megatron_rl.types import UserError
from tools.serving.checkpoint_index import SCHEME, UnknownError, unknown, utc
from tools.serving.ordering import BusyError
from tools.serving.request_checks import read_number
from tools.serving.server_state import ServerState
from tools.serving.wire import parse_forward_backward, refuse

LONG_POLL_SECONDS = 30.0  # the client gives up after 45
MOST_BYTES = 64 << 20  # of a body; the client splits data at 5 MB, but a single datum may be larger
_PREFIX = "/api/v1/"
_CHECKED = (b"x-api-key", b"host", b"content-length")
_KEY = re.compile(r"tml-[\x21-\x7e]{1,200}")
_FILES = f"{_PREFIX}files/"  # by signed addresses, without a key
_URL_SECONDS = 3600
_SECRET = secrets.token_bytes(32)
_CONFIG = {"pjwt_auth_enabled": False, "sample_use_retrieve_futures": False, "proto_compress_fwdbwd": False}


def read_tokens(path: Path) -> dict[str, str]:
    """Return owner by key of a token file: a key per line, with the owner's name after it, or the line's number.

    Raises:
        UserError: a key that the client would not send, or a file that others can read.
    """
    if path.stat().st_mode & 0o077:
        raise UserError(
            f"others can read {path}", source="serve.token_file", expected="mode 600", hint=f"chmod 600 {path}"
        )
    owners = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        key, _, owner = line.strip().partition(" ")
        if key and not key.startswith("#"):
            if not _KEY.fullmatch(key) or len(key) < 20:
                raise UserError(
                    f"line {number} is no key",
                    source=str(path),
                    expected="tml- and at least 16 characters, then a space and the owner's name",
                    hint="python -c 'import secrets; print(\"tml-\" + secrets.token_urlsafe(24))'",
                )
            owners[key] = owner.strip() or f"line-{number}"
    if not owners:
        raise UserError("no key", source=str(path), expected="a key per line", hint="write one, or leave it out")
    return owners


def find_owner(key: str, owners: Mapping[str, str] | None) -> str | None:
    """Return the owner of a key; without a token file every key of the client's form is the same owner's."""
    if owners is None:
        return "local" if _KEY.fullmatch(key) else None
    given, found = key.encode(errors="replace"), None
    for known, owner in owners.items():  # all of them, for the same time with every key
        found = owner if hmac.compare_digest(known.encode(), given) else found
    return found


@functools.lru_cache(maxsize=64)
def is_own_host(header: str, host: str) -> bool:
    """Return whether a Host header is an address, localhost or the name of this server (against DNS rebinding)."""
    name = re.sub(r":\d+$", "", header).strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", host.lower())
    return True


class _Gate:
    """ASGI middleware that refuses a request before its body is read: foreign Host, no key, a body that is too long."""

    def __init__(self, app: Any, owners: Mapping[str, str] | None, host: str) -> None:
        self._app, self._owners, self._host = app, owners, host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = ((name.lower(), value) for name, value in scope["headers"])
        headers = {name.decode(): value.decode("latin-1") for name, value in given if name in _CHECKED}
        owner = find_owner(headers.get("x-api-key", ""), self._owners)
        refusal = None
        if not is_own_host(headers.get("host", ""), self._host):
            refusal = 403, "the Host header is another server's"
        elif owner is None and not scope["path"].startswith(_FILES):
            refusal = 401, "X-API-Key is missing or unknown: set TINKER_API_KEY to a key of serve.token_file"
        elif not headers.get("content-length", "0").isdigit() or int(headers.get("content-length", "0")) > MOST_BYTES:
            refusal = 413, f"a body of more than {MOST_BYTES} bytes: send fewer data in a request"
        if refusal is not None:
            await JSONResponse({"detail": refusal[1]}, refusal[0])(scope, receive, send)
            return
        seen = 0

        async def receive_some() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MOST_BYTES:  # of a body in chunks, whose length no header gives
                raise _TooLongError
            return message

        scope["state"] = {**scope.get("state", {}), "owner": owner}
        await self._app(scope, receive_some, send)


class _TooLongError(Exception):
    pass


def build_app(state: ServerState, owners: Mapping[str, str] | None, host: str) -> Any:
    """Return the ASGI application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(UnknownError, _answer(404))
    app.add_exception_handler(UserError, _answer(400))
    app.add_exception_handler(BusyError, _answer(429))
    app.add_exception_handler(_TooLongError, _answer(413))
    app.add_exception_handler(Exception, _answer(422))  # not 500, after which the client would repeat it for minutes
    _add_work(app, state)  # first, as routes are tried in their order
    _add_sessions(app, state)
    _add_lists(app, state)
    _add_files(app, state)
    return _Gate(app, owners, host)


def _answer(status: int) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, status)

    return answer


def _sign(path: str, expires: int) -> str:
    return hmac.new(_SECRET, f"{path} {expires}".encode(), "sha256").hexdigest()


async def _read(request: Request) -> dict[str, Any]:
    """Return the JSON object of a body (UserError if it is none)."""
    try:
        body = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError) as error:
        raise refuse(f"a body that is no JSON: {error}", request.url.path, "a JSON object") from None
    if not isinstance(body, dict):
        raise refuse("a body that is no JSON object", request.url.path, "a JSON object")
    return body


def _add_json(app: FastAPI, name: str, act: Callable[[str, dict[str, Any]], Any]) -> None:
    """Serve POST of a JSON object by a function of the owner and the object."""

    async def post(request: Request) -> Response:
        return JSONResponse(act(request.state.owner, await _read(request)))

    app.add_route(_PREFIX + name, post, methods=["POST"])


def _add_sessions(app: FastAPI, state: ServerState) -> None:
    served = state.served
    model = {
        "model_name": served.name,
        "max_context_length": served.limits.context,
        "trainable": True,
        "sampleable": True,
    }

    async def answer_get(request: Request) -> Any:
        name = request.url.path.rpartition("/")[2]
        return {"status": "ok"} if name == "healthz" else {"supported_models": [model]}

    async def finish(request: Request, session: str) -> Response:
        state.close_session(request.state.owner, session)
        return Response(status_code=204)

    for name in ("healthz", "get_server_capabilities"):
        app.add_api_route(_PREFIX + name, answer_get, methods=["GET"])
    app.add_api_route(_PREFIX + "sessions/{session}/finish", finish, methods=["POST"])
    _add_json(app, "client/config", lambda owner, body: _CONFIG)
    _add_json(app, "client/dynamic_config", lambda owner, body: {"sample_cancel_enabled": True})
    _add_json(app, "create_session", lambda owner, body: {"session_id": state.open_session(owner, body)})
    _add_json(app, "session_heartbeat", lambda owner, body: {"session_id": state.touch_session(owner, body)})
    _add_json(app, "telemetry", lambda owner, body: {"status": "accepted"})


def _add_work(app: FastAPI, state: ServerState) -> None:
    queue = state.queue

    async def forward_backward(request: Request) -> Response:
        if (coding := request.headers.get("content-encoding", "identity")) != "identity":
            raise refuse(f"a body in {coding}", "forward_backward", "no content encoding")
        body = await request.body()
        return JSONResponse(state.forward_backward(request.state.owner, parse_forward_backward(body), len(body)))

    async def asample(request: Request) -> Response:
        return JSONResponse(state.sample(request.state.owner, await _read(request), len(await request.body())))

    async def retrieve(request: Request) -> Response:
        request_id = str((await _read(request)).get("request_id"))
        future = queue.find(request_id) if state.owns_request(request.state.owner, request_id) else None
        if future is None:
            return JSONResponse({"detail": f"there is no request {request_id!r:.200}, or its answer has expired"}, 410)
        if not future.done():
            await asyncio.wait([asyncio.wrap_future(future)], timeout=LONG_POLL_SECONDS)
        if not future.done():
            return JSONResponse({"detail": "not yet"}, 408)
        answer = future.result()
        return Response(answer.body, media_type=answer.media_type)

    async def cancel(request: Request) -> Response:
        request_id = str((await _read(request)).get("request_id"))
        if state.owns_request(request.state.owner, request_id):
            queue.cancel(request_id)
        return Response(status_code=204)

    # Plain routes of Starlette, without FastAPI's reading of arguments; the most frequent first.
    for name, post in (
        ("retrieve_future", retrieve),
        ("asample", asample),
        ("forward_backward", forward_backward),
        ("cancel_future", cancel),
    ):
        app.add_route(_PREFIX + name, post, methods=["POST"])
    for name, act in {
        "optim_step": state.optim_step,
        "save_weights_for_sampler": state.save_weights_for_sampler,
        "create_model": state.create_model,
        "get_info": state.describe_model,
        "save_weights": state.save_weights,
        "save_weights_external": state.save_weights_external,
        "load_weights": state.load_weights,
        "create_sampling_session": state.open_sampler,
    }.items():
        _add_json(app, name, act)


def describe_run(state: ServerState, owner: str, run: str) -> dict[str, Any]:
    """Return the content of a training run: a model, or the checkpoints that a former server has saved."""
    index, served = state.checkpoints, state.served
    runs, model = index.runs(owner), state.models.get(run)
    lora = index.lora_of_run(owner, run)
    if model is not None and model.owner == owner:
        runs[run], lora = model.metadata, model.lora
    if run not in runs:
        raise unknown("training run", run)
    saved = index.list(owner, run)
    last = {one["checkpoint_type"]: one for one in saved}
    return {
        "training_run_id": run,
        "base_model": served.name,
        "model_owner": owner,
        "last_request_time": saved[-1]["time"] if model is None else utc(model.touched),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": runs[run],
        "is_lora": served.lora is not None,
        "lora_rank": lora and lora.rank,
    }


def _add_lists(app: FastAPI, state: ServerState) -> None:
    index, served = state.checkpoints, state.served

    def page(request: Request, name: str, rows: list[Any]) -> dict[str, Any]:
        given = {key: int(value) for key, value in request.query_params.items() if value.isdigit()}
        offset, limit = given.get("offset", 0), given.get("limit", 100)
        cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
        return {name: rows[offset : offset + limit], "cursor": cursor}

    async def list_runs(request: Request) -> Any:
        owner = request.state.owner
        names, rows = [*(name for name, one in [*state.models.items()] if one.owner == owner), *index.runs(owner)], []
        for name in dict.fromkeys(names):
            with suppress(UnknownError):  # the main thread has closed it since
                rows.append(describe_run(state, owner, name))
        return page(request, "training_runs", rows)

    async def get_run(request: Request, run: str) -> Any:
        return describe_run(state, request.state.owner, run)

    async def list_of_run(request: Request, run: str) -> Any:
        return page(request, "checkpoints", index.list(request.state.owner, run))

    async def list_all(request: Request) -> Any:
        return page(request, "checkpoints", index.list(request.state.owner))

    async def remove(request: Request, run: str, kind: str, name: str) -> Response:
        index.remove(request.state.owner, f"{SCHEME}{run}/{kind}/{name}")
        return Response(status_code=204)

    async def limit(request: Request, run: str, kind: str, name: str) -> Response:
        seconds = read_number(await _read(request), "ttl_seconds", None)
        index.limit(request.state.owner, f"{SCHEME}{run}/{kind}/{name}", seconds)
        return Response(status_code=204)

    async def get_sampler(request: Request, name: str) -> Any:
        sampler = state.find_sampler(request.state.owner, name)
        return {"sampler_id": name, "base_model": served.name, "model_path": sampler.model_path}

    async def list_sessions(request: Request) -> Any:
        owner = request.state.owner
        return {"sessions": [name for name, one in [*state.sessions.items()] if one["owner"] == owner]}

    def describe_weights(owner: str, body: dict[str, Any]) -> dict[str, Any]:
        lora = index.lora_of(index.find(owner, body.get("tinker_path")))
        return {"base_model": served.name, "is_lora": lora is not None, **(lora.describe() if lora else {})}

    _add_json(app, "weights_info", describe_weights)
    run, one = "training_runs/{run}", "training_runs/{run}/checkpoints/{kind}/{name}"
    for path, method, act in (
        ("training_runs", "GET", list_runs),
        (run, "GET", get_run),
        (f"{run}/checkpoints", "GET", list_of_run),
        ("checkpoints", "GET", list_all),
        (one, "DELETE", remove),
        (f"{one}/ttl", "PUT", limit),
        ("samplers/{name}", "GET", get_sampler),
        ("sessions", "GET", list_sessions),
    ):
        app.add_api_route(_PREFIX + path, act, methods=[method])


def _add_files(app: FastAPI, state: ServerState) -> None:
    index, files = state.checkpoints, "training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"

    async def sign_files(request: Request, run: str, kind: str, name: str) -> Any:
        path, expires = f"{run}/{kind}/{name}", int(time.time()) + _URL_SECONDS
        entry = index.find(request.state.owner, SCHEME + path)
        if entry["checkpoint_type"] != "external":
            raise refuse(path, "path", "a checkpoint of save_weights_external", "save the model with it")
        root, urls = str(request.base_url).rstrip("/"), {}
        for file in index.list_files(SCHEME + path):
            address = f"{_FILES}{path}/{file}"
            urls[file] = f"{root}{quote(address)}?expires={expires}&signature={_sign(address, expires)}"
        return {"urls": urls, "expires": utc(expires)}

    async def send_file(request: Request, run: str, kind: str, name: str, file: str) -> Response:
        given, path = request.query_params, f"{_FILES}{run}/{kind}/{name}/{file}"
        expires = int(given.get("expires", "0")) if given.get("expires", "").isdecimal() else 0
        if hmac.compare_digest(given.get("signature", "").encode(), _sign(path, expires).encode()):
            found = index.list_files(f"{SCHEME}{run}/{kind}/{name}").get(file)
            if expires > time.time() and found is not None:
                return FileResponse(found)
        return JSONResponse({"detail": "the address is not valid, or no longer: ask for new ones"}, 403)

    app.add_api_route(_PREFIX + files, sign_files, methods=["GET"])
    app.add_api_route(_FILES + "{run}/{kind}/{name}/{file:path}", send_file, methods=["GET"])
