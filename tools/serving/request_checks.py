# SPDX-License-Identifier: Apache-2.0
"""Checks of requests on rank 0, before any rank sees them: a request that passes can be run by all ranks alike."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.engines.protocol import Sampled
from megatron_rl.engines.token_requests import TokenRequest
from tools.serving.wire import LENGTH, MESSAGES, NO_LOGPROB, STOP, read_json_tensor, read_tensor, refuse, write_like

LOSSES = "importance_sampling, ppo, cispo, dro, gspo or cross_entropy"
_ADAM = {  # AdamParams -> its default, and the setting of `optim_step`
    "learning_rate": (1e-4, "lr"),
    "beta1": (0.9, "beta1"),
    "beta2": (0.95, "beta2"),
    "eps": (1e-12, "eps"),
    "weight_decay": (0.0, "weight_decay"),
    "grad_clip_norm": (0.0, "grad_clip_norm"),
}
_MOST_SAMPLES, _MOST_TOP = 1024, 20
_TARGETS = "target_prompt_logprobs"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Limits:
    """Sizes of the served model.

    Attributes:
        context: tokens of prompt and response together.
    """

    vocab_size: int
    context: int


class Lora(NamedTuple):
    """The adapters of a model.

    Attributes:
        seed: of A's first values.
        modules: PEFT names of the matrices.
    """

    rank: int
    seed: int
    modules: tuple[str, ...]

    def __str__(self) -> str:
        """Return rank and matrices for errors."""
        return f"adapters of rank {self.rank} for {', '.join(self.modules)}"

    def describe(self) -> dict[str, Any]:
        """Return the fields of the client's `LoraConfig`."""
        in_attention = [module in _ATTENTION for module in self.modules]
        trained = {"train_attn": any(in_attention), "train_mlp": not all(in_attention), "train_unembed": False}
        return {"lora_rank": self.rank, **trained}


class Saved(NamedTuple):
    """A checkpoint on disk.

    Attributes:
        rank: of the adapters, if any.
        is_export: weights in Hugging Face's or PEFT's format, without the optimizer.
    """

    directory: str
    rank: int | None
    is_export: bool


@dataclass(frozen=True)
class AdapterLimits:
    """The recipe's adapters: models have their rank or a smaller one, and their matrices or some of them.

    Attributes:
        fixed: why a model has these adapters and no others, if so.
        ignores_unembed: whether a client's wish to train the unembedding is accepted without effect.
    """

    most: Lora
    fixed: str | None = None
    ignores_unembed: bool = False


def read_lora(body: Mapping[str, Any], limits: AdapterLimits | None) -> Lora | None:
    """Return the adapters of a create_model request; `None` if all weights are trained.

    Raises:
        UserError: the server has no such adapters.
    """
    given = body.get("lora_config")
    given = given if isinstance(given, Mapping) else {}
    attention, mlp = (given.get(name) is not False for name in ("train_attn", "train_mlp"))
    if limits is None:
        if not (attention and mlp):
            hint = "leave train_attn and train_mlp out, or start the server with actor.lora.rank"
            raise refuse("a part of the weights, and this server trains all", "lora_config", "all of them", hint)
        return None
    most = limits.most
    modules = tuple(one for one in most.modules if (attention if one in _ATTENTION else mlp))
    rank, seed = read_number(given, "rank", most.rank, int), read_number(given, "seed", most.seed, int)
    if not modules:
        hint = f"train some of {', '.join(most.modules)}, or start the server with other actor.lora.target_modules"
        raise refuse("adapters of no matrix", "lora_config", "train_attn or train_mlp", hint)
    if given.get("train_unembed") and not limits.ignores_unembed:
        hint = "pass train_unembed=False, or start the server with serve.train_unembed=ignore"
        raise refuse("train_unembed, and the unembedding has no adapter", "lora_config", "train_unembed=False", hint)
    if not 1 <= rank <= most.rank:
        hint = f"start the server with actor.lora.rank={rank}" if rank > 0 else "pass rank=8"
        raise refuse(f"adapters of rank {rank}", "lora_config", f"rank 1 to {most.rank}", hint)
    if limits.fixed is not None and (rank, modules) != (most.rank, most.modules):
        raise refuse(str(Lora(rank, seed, modules)), "lora_config", str(most), limits.fixed)
    return Lora(rank, seed, modules)


def check_tokens(tokens: np.ndarray, where: str, limits: Limits) -> None:
    """Raise a UserError for a token outside of the vocabulary."""
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < limits.vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= limits.vocab_size)].flat[0]
        raise refuse(f"{where}: token {wrong}", where, f"0 to {limits.vocab_size - 1}", "use the tokenizer of get_info")


def read_adam(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `optim_step` for an optim_step request; their ranges are checked there."""
    given = body.get("adam_params")
    if not isinstance(given, Mapping):
        raise refuse(
            "an optim_step without adam_params", "optim_step", "AdamParams; this server has no other optimizer"
        )
    if unknown := given.keys() - _ADAM.keys():
        raise refuse(f"AdamParams with {', '.join(sorted(unknown))}", "adam_params", ", ".join(_ADAM))
    found = {ours: read_number(given, name, default) for name, (default, ours) in _ADAM.items()}
    betas = found.pop("beta1"), found.pop("beta2")
    return found | {"betas": betas, "grad_clip_norm": max(found["grad_clip_norm"], 0.0)}


def read_number(given: Mapping[str, Any], name: str, default: Any, kind: type = float) -> Any:
    """Return a finite number of a JSON object; `default` if it is absent or null."""
    value = given.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (kind is int and value != int(value)):
        raise refuse(f"{name} = {value!r:.80}", name, "a whole number" if kind is int else "a finite number")
    return kind(value)


@dataclass(frozen=True)
class SampleJob:
    """A checked sampling request.

    Attributes:
        num_scored: last tokens of the prompt whose log-probs are returned.
        targets: message of a tensor [p - 1, k], in bytes: tokens to score after each one of the prompt, -1 for none.
        version: name of the weights.
        saved: the checkpoint that they are read from, if any.
    """

    request: TokenRequest
    num_samples: int
    num_scored: int
    targets: bytes | None = None
    version: str = ""
    saved: Saved | None = None

    def read_targets(self) -> tuple[Any, np.ndarray]:
        """Return the message of `targets`, and its values."""
        message = MESSAGES["Tensor"].FromString(self.targets)
        return message, read_tensor(message, _TARGETS, -1)


def read_sample(body: Mapping[str, Any], limits: Limits) -> SampleJob:
    """Return the job of an asample request.

    Raises:
        UserError: it cannot be served as it is.
    """
    if body.get("record_stability_info"):
        found = "a sample for stable_reinforce, whose formula is not published"
        raise refuse(found, "record_stability_info", hint=f"pass loss_fn={LOSSES}")
    if body.get(name := "prompt_alt_tokens_k"):
        raise refuse(f"a sample with {name}", name, "a request without it", "topk_prompt_logprobs is served")
    prompt = read_prompt(body.get("prompt"), limits)
    given = body.get("sampling_params")
    given = given if isinstance(given, Mapping) else {}
    room = limits.context - len(prompt)
    numbers: dict[str, tuple[Any, float, float]] = {
        "prompt tokens": (len(prompt), 1, limits.context - 1),
        "max_tokens": (read_number(given, "max_tokens", max(room, 1), int), 1, math.inf),
        "temperature": (read_number(given, "temperature", 1.0), 0, math.inf),
        "top_p": (read_number(given, "top_p", 1.0), 1e-9, 1),
        "top_k": (read_number(given, "top_k", -1, int), -1, math.inf),
        "num_samples": (read_number(body, "num_samples", 1, int), 1, _MOST_SAMPLES),
        "topk_prompt_logprobs": (read_number(body, "topk_prompt_logprobs", 0, int), 0, _MOST_TOP),
        "topk_sample_logprobs": (read_number(body, "topk_sample_logprobs", 0, int), 0, _MOST_TOP),
        "prompt_logprobs_last_n": (read_number(body, "prompt_logprobs_last_n", len(prompt), int), 1, len(prompt)),
    }
    for name, (value, least, largest) in numbers.items():
        if not least <= value <= largest:
            raise refuse(f"{name} = {value}", "asample", f"{least} to {largest}")
    values = {name: value for name, (value, _, _) in numbers.items()}
    stop_ids, stops = _read_stops(given.get("stop"))
    seed, top_prompt = read_number(given, "seed", None, int), values["topk_prompt_logprobs"]
    is_scored = bool(body.get("prompt_logprobs"))
    request = TokenRequest(
        prompt,
        max_tokens=min(values["max_tokens"], room),
        seed=secrets.randbits(62) if seed is None else abs(seed),
        temperature=values["temperature"],
        top_p=values["top_p"],
        top_k=values["top_k"] or -1,
        stop=stops,
        stop_token_ids=stop_ids,
        top_logprobs=values["topk_sample_logprobs"],
        prompt_logprobs=top_prompt if is_scored or top_prompt else None,
    )
    num_scored = values["prompt_logprobs_last_n"] if is_scored else 0
    return SampleJob(request, values["num_samples"], num_scored, _read_targets(body.get(_TARGETS), prompt, limits))


def _read_targets(given: Any, prompt: np.ndarray, limits: Limits) -> bytes | None:
    if given is None:
        return None
    message = read_json_tensor(given, _TARGETS)
    targets = read_tensor(message, _TARGETS, -1)
    if targets.ndim != 2 or len(targets) != len(prompt) - 1 or not (targets >= 0).any():
        found, shape = f"target_prompt_logprobs of shape {list(targets.shape)}", f"[{len(prompt) - 1}, k]"
        raise refuse(found, _TARGETS, f"{shape} for this prompt, with at least one token")
    check_tokens(np.where(targets == -1, 0, targets), _TARGETS, limits)
    return message.SerializeToString()


def write_samples(job: SampleJob, found: Sequence[Sampled], scored: np.ndarray | None = None) -> bytes:
    """Return the result of a sampling request; `scored` has the log-probs of its `targets`."""
    out, request = MESSAGES["SampleResponse"](), job.request
    all_scores: list[Any] = [one.scores for one in found]
    scores = all_scores[0]
    for one, own in zip(found, all_scores, strict=True):
        sequence = out.sequences.add(stop_reason=STOP if one.finish_reason == "stop" else LENGTH)
        sequence.tokens, sequence.logprobs = one.tokens.astype("<i4").tobytes(), one.logprobs.astype("<f4").tobytes()
        if request.top_logprobs:
            _write_top(sequence.topk_sampled_logprobs, own.top_ids, own.top_logprobs)
    unscored = len(request.tokens) - job.num_scored
    if job.num_scored:
        logprobs = np.where(np.arange(len(request.tokens)) < unscored, np.nan, scores.prompt_logprobs)
        out.prompt_logprobs = logprobs.astype("<f4").tobytes()
    if request.prompt_logprobs:
        _write_top(out.topk_prompt_logprobs, scores.prompt_top_ids, scores.prompt_top_logprobs)
    if scored is not None:
        message, targets = job.read_targets()
        out.target_prompt_logprobs.CopyFrom(write_like(message, np.where(targets < 0, 0.0, scored)))
    return out.SerializeToString()


def _write_top(message: Any, ids: np.ndarray, logprobs: np.ndarray) -> None:
    is_empty = ~(logprobs > NO_LOGPROB)  # of the first token, and of tokens that top-p or top-k cut
    message.token_ids = np.where(is_empty, 0, ids).astype("<i4").tobytes()
    message.logprobs = np.where(is_empty, NO_LOGPROB, logprobs).astype("<f4").tobytes()
    message.length, message.k = ids.shape


def read_prompt(prompt: Any, limits: Limits) -> np.ndarray:
    """Return the tokens of a model input in JSON."""
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    tokens: list[Any] = []
    for chunk in chunks if isinstance(chunks, list) else [None]:
        held = chunk.get("tokens") if isinstance(chunk, Mapping) else None
        if not isinstance(held, list) or not all(type(token) is int for token in held):
            raise refuse("a prompt with an image, audio or no tokens", "prompt", "chunks of text tokens")
        tokens += held
    if any(abs(token) > np.iinfo(np.int32).max for token in tokens):
        raise refuse("a prompt with a number that is no token", "prompt", f"0 to {limits.vocab_size - 1}")
    found = np.array(tokens, np.int32)
    check_tokens(found, "prompt", limits)
    return found


def _read_stops(stop: Any) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Return stop tokens and stop texts: the model's own tokens by default, and nothing for an empty list."""
    if stop is None:
        return None, ()
    stops: Any = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not (
        all(isinstance(one, str) and one for one in stops) or all(type(one) is int for one in stops)
    ):
        raise refuse(f"stop = {stop!r:.80}", "stop", "a text, a list of texts, or a list of tokens")
    if stops and isinstance(stops[0], str):
        return (), tuple(stops)
    return tuple(stops), ()
