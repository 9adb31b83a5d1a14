# SPDX-License-Identifier: Apache-2.0
"""Run the same sequences through transformers, Megatron and an engine, and compare the results; collective.

transformers on the HF files is the reference. Megatron loads HF files or a distributed checkpoint. vLLM loads HF files
through its placement table and samples the responses that all models score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from megatron_rl.checkpoint.files import CONFIG_DIR
from megatron_rl.checkpoint.huggingface import check_checkpoint, load_huggingface
from megatron_rl.config.run_spec import RoleSpec
from megatron_rl.config.schema import LayoutConfig, ModelConfig, RolloutConfig
from megatron_rl.engines.build import build_engine
from megatron_rl.engines.protocol import EngineSpec, Request, SamplingConfig
from megatron_rl.extension.registry import ENGINES
from megatron_rl.parallel.collectives import Process, share_object, world
from megatron_rl.parallel.groups import build_groups
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.rollout.generation import generate
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.training.roles.frozen import score_sequences
from megatron_rl.training.setup import RoleSetup
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.model_config import load_model_shape
from megatron_rl.weights.support import check_rollout_layout, check_training_layout
from tools.parity.report import make_report, measure_gaps
from tools.parity.trace import trace_huggingface, trace_megatron
from tools.parity.weights import WrongTensor, compare_weights

TRACED_TOKENS = 32
Scores = list[torch.Tensor]  # [tokens] per sequence


@dataclass(frozen=True)
class ParityCheck:
    """Settings of a comparison.

    Attributes:
        hf: reference model.
        weights: distributed checkpoint for Megatron; the HF files if `None`.
        layout: Megatron's.
        engine: no engine if `None`.
        prompts: [s] tokens each.
        response_length: sampled tokens per prompt.
    """

    hf: Path
    weights: Path | None
    layout: ParallelLayout
    sequence_parallel: bool
    dtype: Literal["float32", "bfloat16"]
    engine: str | None
    engine_tp_size: int
    prompts: Sequence[np.ndarray]
    response_length: int


def run_parity(check: ParityCheck, process: Process) -> dict[str, Any]:
    """Return the report (see `make_report`) on every rank.

    Raises:
        UserError: models or layouts that cannot be compared.
    """
    reference = load_model_shape(check.hf)
    check_checkpoint(check.hf, reference)
    shape = reference if check.weights is None else load_model_shape(check.weights / CONFIG_DIR)
    layout = check.layout
    check_training_layout(shape, layout, sequence_parallel=check.sequence_parallel)
    build = partial(
        build_policy,
        check.weights or check.hf,
        shape,
        check.dtype,
        layout,
        sequence_parallel=check.sequence_parallel,
    )
    wrong: dict[str, list[WrongTensor]] = {}
    sequences, engine_scores = [*check.prompts], None
    policy = build() if check.engine and ENGINES[check.engine].has("is_actor") else None
    if check.engine is not None:
        sequences, engine_scores, wrong[_engine_name(check)] = _ask_engine(check, process, policy)
    policy = policy or build()
    wrong["megatron"] = _join(compare_weights(check.hf, policy.placements(process.rank), policy.params))
    skip = [len(prompt) if engine_scores else 1 for prompt in check.prompts]
    megatron = score_sequences(policy, sequences, skip)
    traced = sequences[0][:TRACED_TOKENS]
    megatron_trace = trace_megatron(policy, traced)
    report: dict[str, Any] | None = None
    if process.rank == 0:
        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            check.hf, dtype=getattr(torch, check.dtype), attn_implementation="eager", local_files_only=True
        )
        model = model.eval().to(process.device)
        scores = {"hf": _score_with_transformers(model, sequences, skip), "megatron": megatron}
        if check.engine is not None and engine_scores:
            scores[_engine_name(check)] = engine_scores
        gaps = measure_gaps(trace_huggingface(model, traced), megatron_trace)
        report = make_report(
            settings=_describe(check),
            scores=scores,
            gaps=gaps,
            wrong={name: tensors for name, tensors in wrong.items() if tensors},
            reference=reference,
            other=shape,
            dtype=check.dtype,
        )
    return share_object(report, world())


def _describe(check: ParityCheck) -> dict[str, Any]:
    return {
        "hf": str(check.hf),
        "checkpoint": str(check.weights) if check.weights else None,
        "layout": check.layout.describe(),
        "sequence_parallel": check.sequence_parallel,
        "dtype": check.dtype,
        "engine": check.engine,
        "engine_tp_size": check.engine_tp_size,
        "prompts": len(check.prompts),
        "response_length": check.response_length if check.engine else 0,
    }


def _engine_name(check: ParityCheck) -> str:
    """Return a name for the engine distinct from "hf" and "megatron"."""
    engine = ENGINES[str(check.engine)]
    return f"{check.engine}_engine" if engine.has("builds_model") or engine.has("is_actor") else str(check.engine)


def _ask_engine(
    check: ParityCheck, process: Process, policy: Any | None
) -> tuple[list[np.ndarray], Scores, list[WrongTensor]]:
    """Return sequences, the engine's log-probs, and wrong weights, on every rank.

    `policy` is the Megatron engine's model; other engines load the HF files.
    """
    assert check.engine is not None
    shape, wrong = load_model_shape(check.hf), list[WrongTensor]()
    longest = max(map(len, check.prompts))
    check_rollout_layout(shape, check.engine_tp_size)
    engine = build_engine(
        EngineSpec(
            model_path=str(check.hf),
            shape=shape,
            dtype=check.dtype,
            max_prompt_length=longest,
            max_response_length=check.response_length,
            process=process,
            model=policy,
            seed=0,
            config=RolloutConfig(
                engine=check.engine, tensor_model_parallel_size=check.engine_tp_size, max_num_seqs=len(check.prompts)
            ),
        )
    )
    try:
        weights, placements = engine.weights, engine.weights.placements(process.rank)
        weights.begin_weight_update()
        if policy is None:
            load_huggingface(check.hf, placements, weights.params)
            wrong = compare_weights(check.hf, placements, weights.params)
        weights.end_weight_update()
        sampling = SamplingConfig(temperature=1.0, max_tokens=check.response_length, stop_token_ids=())
        responses = generate(
            engine.requests, [Request(i, prompt, i, sampling) for i, prompt in enumerate(check.prompts)]
        )
    finally:
        engine.requests.close()
    sequences = [np.concatenate([p, r.tokens]) for p, r in zip(check.prompts, responses, strict=True)]
    scores = [torch.from_numpy(np.asarray(response.logprobs, np.float32)) for response in responses]
    # Engines are replicas: the first one is compared.
    sequences, scores = share_object((sequences, scores), world())
    return sequences, scores, _join(wrong)


def _join(wrong: list[WrongTensor]) -> list[WrongTensor]:
    """Merge the wrong tensors of all ranks; collective."""
    parts: list[list[WrongTensor]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, wrong)
    found: dict[str, WrongTensor] = {}
    for tensor in (tensor for part in parts for tensor in part):
        found.setdefault(tensor.name, tensor)
    return list(found.values())


@torch.no_grad()
def _score_with_transformers(model: torch.nn.Module, sequences: Sequence[np.ndarray], skip: Sequence[int]) -> Scores:
    found = []
    for tokens, first in zip(sequences, skip, strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64)).to(next(model.parameters()).device)
        logprobs = model(ids[None]).logits[0, first - 1 : -1].double().log_softmax(-1)
        found.append(logprobs.gather(1, ids[first:, None])[:, 0].float().cpu())
    return found


def build_policy(
    weights: Path,
    shape: ModelShape,
    dtype: Literal["float32", "bfloat16"],
    layout: ParallelLayout,
    *,
    sequence_parallel: bool,
) -> PackedModel:
    """Build a frozen policy in `layout` and load its weights; collective."""
    config = LayoutConfig(
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        virtual_pipeline_model_parallel_size=layout.vpp_size if layout.vpp_size > 1 else None,
        context_parallel_size=layout.cp_size,
        expert_model_parallel_size=layout.ep_size,
        expert_tensor_parallel_size=layout.etp_size,
        sequence_parallel=sequence_parallel,
    )
    spec = RoleSpec(name="policy", path=str(weights), section="layout", settings=config, head="logprob")
    return PackedModel(
        RoleSetup(
            spec=spec,
            model=ModelConfig(path=str(weights), dtype=dtype),
            shape=shape,
            groups=build_groups(layout),
            seed=0,
        )
    )
