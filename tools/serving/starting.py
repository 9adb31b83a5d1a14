# SPDX-License-Identifier: Apache-2.0
"""Start of a server: the recipe, the model, HTTP in a thread of rank 0, and the loop in which all ranks follow it."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.checks import check_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.passed_rows import pass_rows
from megatron_rl.observability.status import StatusPage
from megatron_rl.parallel.collectives import raise_together, share_object, world
from megatron_rl.run.building import RunSinks, launched_sizes
from megatron_rl.run.grpo import check
from megatron_rl.run.inputs import Parts
from megatron_rl.run.loading import load_config
from megatron_rl.run.primitives import Primitives, build_primitives
from megatron_rl.types import UserError, text_of
from tools.serving.checkpoint_index import SCHEME, unknown, utc
from tools.serving.http_api import build_app, read_tokens
from tools.serving.ordering import SAMPLE, Answer, Call, RequestQueue, answer_error, answer_json
from tools.serving.request_checks import AdapterLimits, Limits, Lora
from tools.serving.served_policy import ServedPolicy, count_versions
from tools.serving.server_state import Served, ServerState, TrainedModel
from tools.serving.wire import refuse

_IDLE_SECONDS = 5.0  # between two broadcasts, far below any `trainer.collective_timeout`
_STOPPED, _SAVED_FILE = "server-stopped", "saved.json"  # a checkpoint, and the sign for launch/supervise.sh
_PATIENCE_SECONDS = 10.0  # until a file of another host is seen
_SLOTS = 5  # of adapters in vLLM: the one that transfers write, and four versions, such as a reference and snapshots


def serve(recipe: Path, arguments: Sequence[str]) -> None:
    """Serve until a signal; then save every model. Collective."""
    given = dict(one.lstrip("-").removeprefix("serve.").split("=", 1) for one in arguments if _is_ours(one))
    if strange := given.keys() - {"port", "host", "token_file", "name", "train_unembed"}:
        expected, hint = "port, host, token_file, name or train_unembed", "python tools/serve.py --help"
        raise UserError(f"serve.{min(strange)}", source="command line", expected=expected, hint=hint)
    owners = check_access(given)
    bound = open_socket(given) if os.environ.get("RANK", "0") == "0" else None
    run = build_run(recipe, [one for one in arguments if not _is_ours(one)])
    directory = Path(run.config.trainer.run_dir or f"checkpoints/served/{recipe.stem}")
    check_shared(directory)
    policy = ServedPolicy(run)
    try:
        if bound is not None:
            state = ServerState(describe_served(run, given), directory, RequestQueue())
            lead(policy, state, run, build_app(state, owners, given.get("host", "127.0.0.1")), bound)
            (directory / _SAVED_FILE).write_text("{}\n")
        else:
            follow(policy)
    finally:
        policy.close()


def build_run(recipe: Path, overrides: Sequence[str]) -> Primitives:
    """Build the model and the engines of a recipe for serving; collective."""
    rows = [{"prompt": "a", "answer": "a"}] * launched_sizes()[0]
    config = make_config(load_config(recipe, overrides).config, pass_rows("train", rows))
    prepared = check(config, recipe, Parts(reward=lambda **row: 0.0))
    return build_primitives(prepared.config, prepared.inputs, prepared.parts, prepared.join(), RunSinks())


def check_shared(directory: Path) -> None:
    """Check that all ranks see the same directory, as each one writes and reads its part of a checkpoint; collective.

    Raises:
        UserError: some rank does not see a file of rank 0; on every rank.
    """
    name, error = share_object(f".seen_by_all_{uuid.uuid4().hex}", world()), None
    expected, hint = "a directory on a file system that all hosts share", "pass trainer.run_dir=DIR"
    if is_first := world().rank() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).touch()
        except OSError as caught:
            found = f"{directory} cannot be written: {caught}"
            error = UserError(found, source="trainer.run_dir", expected=expected, hint=hint)
    raise_together(error, world())
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (directory / name).exists():  # a file system over the network may be late
        if time.monotonic() > deadline:
            found = f"{socket.gethostname()} does not see the files that rank 0 writes to {directory}"
            error = UserError(found, source="trainer.run_dir", expected=expected, hint=hint)
            break
        time.sleep(0.1)
    try:
        raise_together(error, world())
    finally:
        if is_first:
            (directory / name).unlink()


def _is_ours(argument: str) -> bool:
    return argument.lstrip("-").startswith("serve.") and "=" in argument


def check_access(given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the owners by key, if there is a token file.

    Raises:
        UserError: an address that others reach without a token file.
    """
    host = given.get("host", "127.0.0.1")
    if "token_file" in given:
        if not (path := Path(given["token_file"])).is_file():
            raise UserError(f"there is no file {path}", source="serve.token_file", expected="a file", hint="write it")
        return read_tokens(path)
    if host not in ("localhost", "::1") and not re.fullmatch(r"127(\.\d{1,3}){3}", host):
        raise UserError(
            f"serve.host = {host} without serve.token_file",
            source="serve.host",
            expected="an address of this machine alone, such as 127.0.0.1, or keys",
            hint="write keys to a file and pass serve.token_file=FILE, or forward the port over ssh",
        )
    return None


def open_socket(given: Mapping[str, str]) -> socket.socket:
    """Open the port before the model is built (UserError)."""
    host, port = given.get("host", "127.0.0.1"), given.get("port", "8000")
    try:
        return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, ValueError) as error:
        hint = "choose another port, or serve.port=0 for any free one"
        found = f"{host}:{port} cannot be served: {error}"
        raise UserError(found, source="serve.port, serve.host", expected="a free port", hint=hint) from error


def make_config(config: RunConfig, rows: list[str]) -> RunConfig:
    """Return a recipe's config for serving: its model, layout and engine, and plain sampling without scores.

    Args:
        rows: name of a set of prompts, one per rank, which are never used.
    """
    ranks, plain = (
        launched_sizes()[0],
        dict(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, min_tokens=0, stop=[], n=2),
    )
    rollout, slots = config.rollout, {}
    if config.hybrid.lora == "adapter" and config.rollout.supports("vllm_modes"):
        slots = {"max_loras": _SLOTS}
    context = config.data.max_prompt_length + config.data.max_response_length
    most = max(config.actor.max_tokens_per_microbatch, context + 1)
    made = RunConfig(
        model=config.model,
        data=replace(config.data, sources={}, train_files=rows, validation_files=[], train_batch_size=ranks),
        actor=replace(
            config.actor, ppo_mini_batch_size=ranks, overlap_grad_reduce=False, max_tokens_per_microbatch=most
        ),
        rollout=replace(rollout, **plain, thinking_budget=None, engine_options=slots | rollout.engine_options),
        hybrid=config.hybrid,
        layout=config.layout,
        placement=config.placement,
        algorithm=replace(AlgorithmConfig(), kl_coef=0.0),
        trainer=config.trainer,
        checkpoint=config.checkpoint,
        observability=config.observability,
    )
    check_config(made)
    return made


def describe_served(run: Primitives, given: Mapping[str, str]) -> Served:
    """Return the model's description for clients.

    Args:
        given: settings of the server.
    """
    config, shape = run.config, run.policy.model.shape
    context = config.data.max_prompt_length + config.data.max_response_length
    limits = Limits(shape.vocab_size, context)
    lora, adapters = None, run.policy.model.adapters
    if adapters is not None:
        fixed = None
        if config.actor.step_mode == "graph" or config.actor.lora.path is not None:
            fixed = "leave rank, train_attn and train_mlp out: actor.step_mode=graph and actor.lora.path fix them"
        most = Lora(adapters.rank, config.trainer.seed, tuple(adapters.modules))
        lora = AdapterLimits(most, fixed, given.get("train_unembed") == "ignore")
    path = str(Path(config.model.path).resolve())
    tokenizer = config.model.tokenizer or path
    name, mixes_versions = given.get("name") or Path(path).name, count_versions(config) > 0
    return Served(name, tokenizer, shape.family, lora, limits, mixes_versions)


def lead(policy: ServedPolicy, state: ServerState, run: Primitives, app: Any, bound: socket.socket) -> None:
    """Answer HTTP in a thread and run its calls, on rank 0, until a signal."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *unused: stopping.set())
    settings = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=75,
        access_log=False,
        server_header=False,
        date_header=False,
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="http", daemon=True)
    thread.start()
    page = open_status_page(run, state)
    host, port = bound.getsockname()[:2]
    print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    error = None
    try:
        while error is None and not stopping.is_set():
            error = take_turn(policy, state)
            if not thread.is_alive():
                error = error or RuntimeError("the HTTP server ended")
        unsaved = save_models(policy, state)
        error = error or unsaved
        share_object(("stop", {}), world())
        if error is not None:
            raise error
    finally:
        if page is not None:
            page.close()
        server.should_exit = True
        thread.join(5.0)


def take_turn(policy: ServedPolicy, state: ServerState) -> Exception | None:
    """Run the next calls, or keep the other ranks waiting for some; return an error that is no client's mistake."""
    try:
        state.checkpoints.expire()
        state.close_silent()
        if calls := state.queue.take(_IDLE_SECONDS):
            run_calls(calls, policy, state.queue)
        else:
            run_together(policy, "idle", {})
    except Exception as error:
        return error
    return None


def save_models(policy: ServedPolicy, state: ServerState) -> Exception | None:
    """Save each model, also if another one cannot be saved; return the first error."""
    first = None
    for model in [*state.models.values()]:
        if not model.is_created:
            continue
        path = f"{SCHEME}{model.model_id}/weights/{_STOPPED}"
        payload = {"model": model.model_id, "directory": str(state.checkpoints.directory_of(path))}
        try:
            if model.is_broken:
                raise RuntimeError("its last request failed halfway; load an earlier checkpoint")
            run_together(policy, "save", payload)
            state.checkpoints.add(path, model.owner, state.served.name, model.describe(), {})
            print(f"saved {path}", flush=True)
        except Exception as error:
            first = first or error
            print(f"not saved: {model.model_id}: {text_of(error)}", flush=True)
    return first


def open_status_page(run: Primitives, state: ServerState) -> StatusPage | None:
    """Serve the status page with steps, queue, models and samplers, if `observability.status_port` is set."""
    settings, started = run.config.observability, time.monotonic()
    if settings.status_port is None:
        return None

    def describe() -> dict[str, Any]:
        waiting, models = state.queue.count(), [*state.models.values()]
        lines = [
            f"{one.model_id}: {one.steps} steps, owner {one.owner}, last request {utc(one.touched)}" for one in models
        ]
        queue = f"{waiting['ready']} requests wait, {waiting['early']} for an earlier one"
        return {
            "step": state.num_steps,
            "total_steps": state.num_steps,
            "phase": f"{len(models)} models, {len(state.samplers)} samplers, {state.num_samples} samples; {queue}",
            "phase_seconds": 0.0,
            "elapsed_seconds": time.monotonic() - started,
            "remaining_seconds": None,
            "rollout": None,
            "warnings": [],
            "config": "\n".join(lines),
        }

    page = StatusPage(state.served.name, *settings.status_address, now=describe)
    print(f"status page: {page.url}", flush=True)
    return page


def follow(policy: ServedPolicy) -> None:
    """Run the commands of rank 0 until it stops; an error that is no user's ends this rank then."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides
    fault = None
    while (command := share_object(None, world()))[0] != "stop":
        try:
            policy.run(*command)
        except UserError:  # rank 0 answers with it
            pass
        except Exception as error:  # rank 0 saves the models
            fault = error
    if fault is not None:
        raise fault


def run_together(policy: ServedPolicy, kind: str, payload: dict[str, Any]) -> Any:
    """Broadcast a command, if other ranks are to follow it, and run it on this rank, too."""
    if world().size() > 1:
        share_object((kind, payload), world())
    return policy.run(kind, payload)


def run_calls(calls: Sequence[Call], policy: ServedPolicy, queue: RequestQueue) -> None:
    """Run a call, or samples that were taken together, and answer them; a user's mistake is an answer, too."""
    call = calls[0]
    try:
        if call.kind == SAMPLE:
            results = run_together(policy, SAMPLE, {"jobs": [one.payload for one in calls]})
        else:
            results = [run_numbered(call, policy)]
        answers = [make_answer(one.reply(result)) for one, result in zip(calls, results, strict=True)]
    except UserError as error:
        if len(calls) > 1:  # the mistake of one of them
            for one in calls:
                run_calls([one], policy, queue)
            return
        answers = [answer_error(error)]
    except Exception as error:
        for one in calls:
            queue.finish(one, answer_error(error))
        raise
    for one, answer in zip(calls, answers, strict=True):
        queue.finish(one, answer)


def run_numbered(call: Call, policy: ServedPolicy) -> Any:
    """Run a call of a model, and return its result.

    After a forward_backward that failed, the next optim_step is refused and the gradients are dropped, so that no step
    is made on a part of a batch.

    Raises:
        UserError: the call was refused, or failed on every rank.
    """
    model = call.group
    if isinstance(model, TrainedModel) and not model.is_created:
        raise unknown("model", model.model_id)
    try:
        if isinstance(call.payload, Exception):
            raise call.payload
        if call.kind == "optim_step" and model.is_torn:
            model.is_torn = False
            run_together(policy, "drop_gradients", {"model": model.model_id})
            raise refuse(
                "a forward_backward since the last step failed: its gradients are incomplete and were dropped",
                call.request_id,
                "an optim_step after forward_backward calls that succeeded",
                "send the whole batch again; the weights are as before",
            )
        return run_together(policy, call.kind, call.payload)
    except UserError:
        if call.kind == "forward_backward":
            model.is_torn = True
        raise
    except Exception:
        if call.kind in ("optim_step", "load"):
            model.is_broken = True
        raise


def make_answer(result: Any) -> Answer:
    """Return the answer of a result: a message's bytes, or a JSON object."""
    return Answer(result) if isinstance(result, bytes) else answer_json(result)
