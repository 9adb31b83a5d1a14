# SPDX-License-Identifier: Apache-2.0
"""A server's sessions, models, samplers and saved checkpoints, each with an owner.

Methods run in HTTP's thread and turn a request into a call of the queue; the functions `reply` of the calls run in the
main thread once every rank is done. An object of another owner is as unknown as one that does not exist.
"""

from __future__ import annotations

import itertools
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.types import UserError
from tools.serving.checkpoint_index import SCHEME, CheckpointIndex, UnknownError, find_encryption, unknown
from tools.serving.ordering import SAMPLE, Call, RequestQueue
from tools.serving.request_checks import (
    AdapterLimits,
    Limits,
    Lora,
    Saved,
    read_adam,
    read_lora,
    read_number,
    read_sample,
)
from tools.serving.wire import read_config, read_data, refuse

_SILENT_SECONDS = 24 * 3600.0
BASE = "base"  # the version of the weights that the server was started with


@dataclass(frozen=True)
class Served:
    """The served model.

    Attributes:
        name: the public name that clients use.
        tokenizer: directory or name for the client's `get_info`.
        lora: the adapters; `None` if all weights are trained.
        mixes_versions: samples of several versions of the weights run together.
    """

    name: str
    tokenizer: str
    architecture: str
    lora: AdapterLimits | None
    limits: Limits
    mixes_versions: bool = False


@dataclass
class TrainedModel:
    """A model in training.

    Attributes:
        is_torn: a part of the gradients since the last step is missing.
        is_broken: a request that changes weights failed halfway.
    """

    model_id: str
    owner: str
    session: str
    metadata: dict[str, Any]
    lora: Lora | None
    touched: float = field(default_factory=time.time)
    steps: int = 0
    is_created: bool = False
    is_torn: bool = False
    is_broken: bool = False

    def describe(self) -> dict[str, Any]:
        """Return the model's fields in the list of checkpoints."""
        return {"metadata": self.metadata, "lora": self.lora and self.lora._asdict()}


@dataclass
class Sampler:
    """A sampling session.

    Attributes:
        version: name of the weights: `BASE`, a snapshot, a checkpoint's path, or a model's id for its current weights.
        saved: the checkpoint.
    """

    owner: str
    session: str
    version: str
    model_path: str | None = None
    saved: Saved | None = None


class ServerState:
    """Sessions, models and samplers of one server.

    Args:
        directory: where checkpoints are written; the list of a former server in it is read.
    """

    def __init__(self, served: Served, directory: Path, queue: RequestQueue) -> None:
        self.served, self.queue = served, queue
        self.checkpoints = CheckpointIndex(directory)
        self.sessions: dict[str, dict[str, Any]] = {}
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, Sampler] = {}
        self._numbers = itertools.count(1)
        self.num_steps = self.num_samples = 0

    # Sessions

    def open_session(self, owner: str, body: Mapping[str, Any]) -> str:
        """Return the id of a new session."""
        session = uuid.uuid4().hex
        self.sessions[session] = {"owner": owner, "seen": time.time(), "metadata": body.get("user_metadata")}
        return session

    def touch_session(self, owner: str, body: Mapping[str, Any]) -> str:
        """Note a sign of life of a session and return its id."""
        session = self.sessions.get(name := str(body.get("session_id")))
        if session is None or session["owner"] != owner:
            raise unknown("session", name)
        session["seen"] = time.time()
        return name

    def close_session(self, owner: str, session: str) -> None:
        """Forget a session, its models and its samplers."""
        self.touch_session(owner, {"session_id": session})
        if self.sessions.pop(session, None) is None:
            return  # another thread closes it
        models = [one.model_id for one in [*self.models.values()] if one.session == session]
        mine = [name for name, one in [*self.samplers.items()] if one.session == session]
        versions = {self.samplers.pop(name).version for name in mine}
        kept = {one.version for one in [*self.samplers.values()]} | {BASE}
        payload = {"names": sorted((versions | {*models}) - kept)}
        self._add(f"{session}/close", "drop", payload, lambda result: self._forget(models))

    def _forget(self, models: list[str]) -> dict[str, Any]:
        for model_id in models:
            self.models.pop(model_id).is_created = False  # for calls that still wait
            self.queue.close_model(model_id)
        return {}

    def close_silent(self) -> None:
        """Close the sessions whose clients have ended without a word; they send a sign of life every ten seconds."""
        for session, one in [*self.sessions.items()]:
            if time.time() - one["seen"] > _SILENT_SECONDS:
                with suppress(UnknownError):  # its client has closed it since
                    self.close_session(one["owner"], session)

    def owns_request(self, owner: str, request_id: str) -> bool:
        """Return whether a request belongs to one of the owner's sessions, whose name begins its id."""
        session = self.sessions.get(re.split("[:/]", request_id)[0])
        return session is not None and session["owner"] == owner

    # Models

    def create_model(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create a model with the base model's weights."""
        self._check_base(body.get("base_model"))
        _check_optimizer(body)
        lora = read_lora(body, self.served.lora)
        model = self._open_model(owner, body, lora)
        payload = {"model": model.model_id, "saved": None, "lora": lora}
        return self._begin(model, payload, lambda: {"model_id": model.model_id, "type": "create_model"})

    def _open_model(self, owner: str, body: Mapping[str, Any], lora: Lora | None) -> TrainedModel:
        session, number = self.touch_session(owner, body), read_number(body, "model_seq_id", 0, int)
        name = f"{session}:train:{number}"  # the client derives the same
        metadata = dict(body.get("user_metadata") or {})
        return self.models.setdefault(name, TrainedModel(name, owner, session, metadata, lora))

    def _begin(
        self, model: TrainedModel, payload: dict[str, Any], content: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        def reply(result: Any) -> dict[str, Any]:
            model.is_created, model.steps = True, result
            return content()

        self.queue.open_model(model.model_id)
        return self._add(f"{model.model_id}/0", "create", payload, reply)

    def find_model(self, owner: str, model_id: Any) -> TrainedModel:
        """Return a model of the owner."""
        model = self.models.get(str(model_id))
        if model is None or model.owner != owner:
            raise unknown("model", model_id)
        return model

    def describe_model(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of get_info."""
        model, served = self.find_model(owner, body.get("model_id")), self.served
        data = {"arch": served.architecture, "model_name": served.name, "tokenizer_id": served.tokenizer}
        lora = {"is_lora": served.lora is not None, "lora_rank": model.lora and model.lora.rank}
        return {"type": "get_info", "model_id": model.model_id, "model_name": served.name, "model_data": data, **lora}

    def forward_backward(self, owner: str, message: Any, size: int) -> dict[str, Any]:
        """Accumulate the gradients of a loss, or compute it alone."""
        model = self.find_model(owner, message.model_id)

        def read() -> dict[str, Any]:
            config = read_config(message)
            return {"datums": read_data(message), "loss": message.loss_fn, "config": config}

        kind = "forward" if message.forward_only else "forward_backward"
        return self._number(model, message.seq_id, kind, read, lambda result: result, size)

    def optim_step(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Update a model's weights."""
        model = self.find_model(owner, body.get("model_id"))

        def reply(result: Any) -> dict[str, Any]:
            model.steps += 1
            self.num_steps += 1
            return {"metrics": result}

        return self._number(model, body.get("seq_id"), "optim_step", lambda: {"settings": read_adam(body)}, reply)

    def save_weights(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Save weights and optimizer under a name."""
        model = self.find_model(owner, body.get("model_id"))
        return self._save(model, body, "weights", bool(body.get("overwrite")), {"type": "save_weights"})

    def save_weights_external(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Save weights in Hugging Face's format, or adapters in PEFT's, for a download."""
        model, encrypt = self.find_model(owner, body.get("model_id")), find_encryption(body)
        return self._save(model, body, "external_weights", True, {"type": "save_weights_external"}, encrypt)

    def save_weights_for_sampler(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Save weights under a name, or open a sampler of a snapshot or of the model's current weights."""
        model = self.find_model(owner, body.get("model_id"))
        if body.get("path"):
            return self._save(model, body, "sampler_weights", True, {"type": "save_weights_for_sampler"})
        is_inflight = body.get("kind") == "inflight"
        version = model.model_id if is_inflight else f"snapshot-{next(self._numbers)}"

        def reply(result: Any) -> dict[str, Any]:
            name = f"{model.session}:sample:{body.get('sampling_session_seq_id')}"
            self.samplers[name] = Sampler(owner, model.session, version)
            return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

        payload = {"version": None if is_inflight else version}
        return self._number(model, body.get("seq_id"), "snapshot", lambda: payload, reply)

    def _save(
        self,
        model: TrainedModel,
        body: Mapping[str, Any],
        kind: str,
        overwrite: bool,
        content: dict[str, str],
        finish: Callable[[Path], None] = lambda directory: None,
    ) -> dict[str, Any]:
        path = f"{SCHEME}{model.model_id}/{kind}/{body.get('path')}"

        def read() -> dict[str, Any]:
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name := str(body.get("path"))):
                raise refuse(f"a checkpoint named {name!r:.80}", "path", "1 to 128 letters, digits, '.', '_' and '-'")
            if path in self.checkpoints.entries and not overwrite:
                raise refuse(f"{path} exists", "path", "a new name", "save under another name, or pass overwrite=True")
            read_number(body, "ttl_seconds", None, int)
            payload = {"directory": str(self.checkpoints.directory_of(path))}
            return payload if kind == "weights" else payload | {"rank": model.lora and model.lora.rank}

        def reply(result: Any) -> dict[str, Any]:
            finish(self.checkpoints.directory_of(path))
            self.checkpoints.add(path, model.owner, self.served.name, model.describe(), body)
            return {"path": path, **content}

        return self._number(model, body.get("seq_id"), "save" if kind == "weights" else "export", read, reply)

    def load_weights(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Load a checkpoint into a model, or into a new one."""
        path, with_optimizer = str(body.get("path")), bool(body.get("optimizer"))

        def read(has: Lora | None = None) -> dict[str, Any]:
            entry = self.checkpoints.find(owner, path)
            if with_optimizer and entry["checkpoint_type"] != "training":
                hint = "load it without the optimizer, or save with save_state"
                raise refuse(f"{path} has no optimizer state", "path", "a training checkpoint", hint)
            lora = self.checkpoints.lora_of(entry)
            if has is not None and lora is not None and (lora.rank, lora.modules) != (has.rank, has.modules):
                hint = "load it into a new training client (create_training_client_from_state)"
                raise refuse(f"{path}, with {lora}", "path", f"the model's {has}", hint)
            return {"saved": self._find_saved(path, entry), "with_optimizer": with_optimizer}

        content = {"path": path, "type": "load_weights"}
        if body.get("model_id"):
            model = self.find_model(owner, body["model_id"])

            def reply(result: Any) -> dict[str, Any]:
                model.steps, model.is_torn = result, False
                return content | {"model_id": model.model_id}

            return self._number(model, body.get("seq_id"), "load", lambda: read(model.lora), reply)
        if body.get("base_model"):
            self._check_base(body["base_model"])
        _check_optimizer(body)
        payload = read()
        model = self._open_model(owner, body, self.checkpoints.lora_of(self.checkpoints.find(owner, path)))
        return self._begin(model, {"model": model.model_id, **payload}, lambda: content | {"model_id": model.model_id})

    def _find_saved(self, path: str, entry: Mapping[str, Any]) -> Saved:
        if entry["checkpoint_type"] == "external":
            raise refuse(path, "path", "a checkpoint of save_state or save_weights_for_sampler", "download this one")
        lora, limits = self.checkpoints.lora_of(entry), self.served.lora
        if limits is None or lora is None:
            is_fit = lora is None and (limits is None or "lora" not in entry)  # which older servers did not note
        else:
            is_fit = lora.rank <= limits.most.rank and {*lora.modules} <= {*limits.most.modules}
        if not is_fit:
            expected = str(limits.most) if limits else "all weights"
            hint = f"start the server with actor.lora.rank={lora.rank if lora else 0} and these target_modules"
            raise refuse(f"{path}, with {lora or 'all weights'}", "path", expected, hint)
        is_export = entry["checkpoint_type"] != "training" and "lora" in entry
        return Saved(str(self.checkpoints.directory_of(path)), lora and lora.rank, is_export)

    # Samplers

    def open_sampler(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Open a sampling session of the base model or of a checkpoint."""
        session, path = self.touch_session(owner, body), body.get("model_path")
        version, saved = BASE, None
        if path is None:
            self._check_base(body.get("base_model"))
        else:
            entry = self.checkpoints.find(owner, path)
            version, saved = f"{path}@{entry['time']}", self._find_saved(path, entry)
        name = f"{session}:sample:{read_number(body, 'sampling_session_seq_id', 0, int)}"
        self.samplers.setdefault(name, Sampler(owner, session, version, path, saved))
        return {"sampling_session_id": name}

    def find_sampler(self, owner: str, name: Any) -> Sampler:
        """Return a sampler of the owner."""
        sampler = self.samplers.get(str(name))
        if sampler is None or sampler.owner != owner:
            raise unknown("sampling session", name)
        return sampler

    def sample(self, owner: str, body: Mapping[str, Any], size: int) -> dict[str, Any]:
        """Sample from the weights of a sampling session."""
        name = body.get("sampling_session_id")
        sampler, job = self.find_sampler(owner, name), read_sample(body, self.served.limits)
        job = replace(job, version=sampler.version, saved=sampler.saved)
        request_id = f"{name}/sample/{read_number(body, 'seq_id', 0, int)}"

        def reply(result: Any) -> Any:
            self.num_samples += job.num_samples
            return result

        group = None if self.served.mixes_versions else sampler.version
        found = self._add(request_id, SAMPLE, job, reply, group, size)
        return found | {"sample_sequence_ids": [f"{request_id}/{index}" for index in range(job.num_samples)]}

    # Calls

    def _add(
        self, request_id: str, kind: str, payload: Any, reply: Callable[[Any], Any], group: Any = None, size: int = 0
    ) -> dict[str, Any]:
        self.queue.add(Call(request_id, kind, payload, reply, group=group, size=size))
        return {"request_id": request_id, "model_id": request_id.split("/")[0]}

    def _number(
        self,
        model: TrainedModel,
        number: Any,
        kind: str,
        read: Callable[[], dict[str, Any]],
        reply: Callable[[Any], Any],
        size: int = 0,
    ) -> dict[str, Any]:
        """Add a numbered call. One that is refused takes its place in the order, as later ones would wait for it."""
        if not isinstance(number, int) or not 1 <= number < 1 << 62:
            raise refuse(f"seq_id = {number!r:.80}", "seq_id", "1, 2, 3, ...")
        model.touched, request_id = time.time(), f"{model.model_id}/{number}"
        try:
            payload: Any = {"model": model.model_id, **read()}
        except UserError as error:
            payload = error
        call = Call(request_id, kind, payload, reply, group=model, size=size)
        self.queue.add_numbered(model.model_id, number, call)
        return {"request_id": request_id, "model_id": model.model_id}

    def _check_base(self, name: Any) -> None:
        if name != self.served.name:
            found, hint = f"base_model {name!r:.200}", f"pass base_model={self.served.name!r}"
            raise refuse(found, "base_model", f"{self.served.name!r}, the model of this server", hint)


def _check_optimizer(body: Mapping[str, Any]) -> None:
    if (kind := (body.get("optimizer_config") or {}).get("type", "adamw")) != "adamw":
        raise refuse(f"the optimizer {kind!r:.80}", "optimizer_config", "adamw", "leave optimizer_config out")
