# SPDX-License-Identifier: Apache-2.0
"""Planned bytes of engines: of their tables, in eight bits, of servers, and of the switch to them.

tests/transfer/test_coding.py compares the bytes of a real switch to eight bits with the same count.
"""

from __future__ import annotations

import math

import pytest

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.memory import compute_memory, find_smallest_cache
from megatron_rl.planning.parameters import (
    compute_engine_bytes,
    count_aliased_elements,
    count_engine_bytes,
    count_own_bytes,
    count_staged_bytes,
)
from megatron_rl.weights.rollout_layout import huggingface_placements, vllm_placements
from megatron_rl.weights.shard_box import box_volume
from planning_jobs import PREFIXED, make_job, published_shape, small_shape
from tools.planning.communication import count_exchanged, count_reduced
from tools.planning.switch import plan_switch

CODED = ("rollout.quantization=int8", "algorithm.importance_sampling=token-truncate")
SERVED = ("rollout.engine=vllm_server", "placement.actor=0-3", "placement.reference=0-3", "placement.rollout=4-7")
MIXTURE = dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
Q, KV, FFN, HIDDEN, LAYERS, VOCAB = 64, 32, 96, 64, 8, 512  # rows of matrices of `small_shape`, and its columns


@pytest.mark.parametrize("changes", [{}, MIXTURE, PREFIXED], ids=["dense", "mixture", "dense first"])
@pytest.mark.parametrize("tp_size", [1, 4])
def test_bytes_are_those_of_the_table(tp_size: int, changes: dict) -> None:
    shape = small_shape(**changes)
    elements = sum(box_volume(p.local_box) for p in vllm_placements(shape, tp_size=tp_size, place=0))
    assert compute_engine_bytes(shape, tp_size, 2) == 2 * elements
    assert compute_engine_bytes(shape, tp_size, 4) == 4 * elements


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (1, 4), (2, 4)])
def test_engines_of_whole_experts_have_a_share_of_them_and_the_rest_by_tp(tp: int, ep: int) -> None:
    """And of the actor's experts, dealt alike, all share its storage; EP ranks with others share none of them."""
    shape = small_shape(**MIXTURE)
    experts = LAYERS * 4 * 3 * 32 * HIDDEN
    rest = compute_engine_bytes(shape, tp, 2) - 2 * experts // tp
    assert compute_engine_bytes(shape, tp, 2, ep_size=ep) == rest + 2 * experts // ep
    layout = ParallelLayout(4, ep_size=4)
    shared = [count_aliased_elements(shape, layout, rank, 1, rank, rollout_ep=4) for rank in range(4)]
    other = count_aliased_elements(shape, layout, 0, 1, 1, rollout_ep=4)
    assert [one - other for one in shared] == [experts // 4] * 4


def test_data_parallel_parts_have_a_cache_each_and_exchange_tokens() -> None:
    """DeepSeek-V3's recipe with engines of TP 8, 16 parts: each caches the latents of its own responses."""
    shape, sizes = (
        published_shape("DeepSeek-V3"),
        ["rollout.gpu_memory_utilization=0.45", "rollout.enforce_eager=false"],
    )
    sizes += ["actor.tensor_model_parallel_size=8", "actor.expert_model_parallel_size=256", "rollout.n=8"]
    sizes += ["actor.expert_tensor_parallel_size=1", "actor.sequence_parallel=true", "data.train_batch_size=256"]
    sizes += ["data.max_prompt_length=1024", "data.max_response_length=8192", "actor.recompute_granularity=full"]
    sizes += ["actor.offload_gradients=true", "actor.offload_optimizer=true", "rollout.max_num_seqs=32"]
    parts = [
        "rollout.tensor_model_parallel_size=8",
        "rollout.data_parallel_size=16",
        "rollout.expert_parallel_size=128",
    ]
    parts += ["rollout.engine_options.max_num_batched_tokens=1024"]
    cluster = dict(nodes=64, gpus_per_node=8)
    before, after = (
        make_job(shape, *sizes, *more, **cluster) for more in (["rollout.tensor_model_parallel_size=64"], parts)
    )
    assert (after.engine_tp, after.engine_dp, after.engine_ep, after.engine_width) == (8, 16, 128, 128)
    small, large = (find_smallest_cache(job, compute_memory(job)) for job in (before, after))
    assert small.kv_bytes_per_token == large.kv_bytes_per_token == 2 * 61 * 576
    assert 16 * large.kv_cache_bytes // (9216 * 2 * 61 * 576) >= 256
    hidden, mixtures = 7168 * 2, 58
    assert count_exchanged(before) == 0 and count_reduced(before) == 4 * 61 * hidden * 63 / 64
    assert count_reduced(after) == (4 * 61 - 2 * mixtures) * hidden * 7 / 8
    assert count_exchanged(after) == mixtures * 2 * 16 * hidden * 127 / 128
    routed = after.with_config(rollout={"engine_options": {"all2all_backend": "deepep_high_throughput"}})
    assert count_exchanged(routed) == mixtures * 2 * 8 / 8 * hidden * 127 / 128


@pytest.mark.parametrize("tp_size", [1, 2])
def test_eight_bits_are_a_byte_an_element_and_four_a_row(tp_size: int) -> None:
    """The rows of attention's output and of the MLP's second matrix are on every rank; embedding and head stay."""
    shape = small_shape()
    split, whole = Q + 2 * KV + 2 * FFN, 2 * HIDDEN
    saved = LAYERS * (HIDDEN * (2 * Q + 2 * KV + 3 * FFN) // tp_size - 4 * (split // tp_size + whole))
    assert compute_engine_bytes(shape, tp_size, 2) - compute_engine_bytes(shape, tp_size, 2, coded=True) == saved


def test_engines_in_eight_bits_take_less_memory_and_leave_more_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that are neither codes nor scales are shared with the actor as before."""
    job, plain = make_job(small_shape(), *CODED), make_job(small_shape())
    (coded,), (whole,) = compute_memory(job), compute_memory(plain)
    shared = count_aliased_elements(job.shape, job.layout, 0, 1, 0, coded=True)
    assert 0 < shared < count_aliased_elements(job.shape, job.layout, 0, 1, 0)
    own = count_engine_bytes(job) - 2 * shared
    assert coded.phases[2].parts["engine weights"] == own and "engine weights" not in whole.phases[2].parts
    assert whole.kv_cache_bytes - coded.kv_cache_bytes == own
    monkeypatch.setattr("megatron_rl.planning.parameters.count_aliased_elements", lambda *_: 0)
    apart = [compute_memory(one)[0].kv_cache_bytes for one in (job, plain)]
    assert apart[0] - apart[1] == count_engine_bytes(plain) - count_engine_bytes(job)


def test_switch_to_eight_bits_counts_codes_and_scales() -> None:
    """From TP 2 to TP 1 a rank lacks half of each matrix, and half of the scales of those that are cut by rows."""
    job = make_job(small_shape(), "actor.tensor_model_parallel_size=2", *CODED, gpus_per_node=2)
    codes, rows = HIDDEN * (2 * Q + 2 * KV + 3 * FFN), Q + 2 * KV + 2 * FFN
    vocabulary = 2 * VOCAB * HIDDEN * 2  # embedding and head in bfloat16
    assert plan_switch(job).summary.bytes_moved == LAYERS * (codes + 4 * rows) + vocabulary


def test_a_cache_of_latents_is_planned() -> None:
    """Bytes per token do not depend on TP; absorbed up-projections are a second copy, and fused ones are no alias."""
    shape, itemsize, layers = published_shape("DeepSeek-V3"), 2, 61
    sizes = [
        "actor.tensor_model_parallel_size=8",
        "actor.sequence_parallel=true",
        "rollout.tensor_model_parallel_size=8",
    ]
    jobs = [make_job(shape, *sizes, f"rollout.latent_cache={on}", nodes=8) for on in ("true", "false")]
    latent, whole = (compute_memory(job)[0] for job in jobs)
    assert latent.kv_bytes_per_token == layers * (512 + 64) * itemsize
    assert whole.kv_bytes_per_token == 2 * layers * 128 // 8 * 192 * itemsize
    absorbed, fused = layers * 128 * (128 + 128) * 512 // 8 * itemsize, layers * 7168 * (1536 + 512 + 64) * itemsize
    assert count_engine_bytes(jobs[0]) - count_engine_bytes(jobs[1]) == absorbed
    assert count_own_bytes(jobs[0], 0) - count_own_bytes(jobs[1], 0) == absorbed + fused


def test_ranks_of_a_server_keep_the_tensors_that_they_write() -> None:
    """In addition to the server's own: each rank a share of the model, all ranks together the whole."""
    job = make_job(small_shape(), *SERVED, "rollout.tensor_model_parallel_size=2")
    staged = [count_staged_bytes(job, rank) for rank in (4, 5)]
    assert sum(staged) == 2 * sum(math.prod(size) for size in job.shape.logical_tensors().values())
    assert staged[1] == 2 * sum(box_volume(p.local_box) for p in huggingface_placements(job.shape)[1::2])
    assert count_staged_bytes(make_job(small_shape()), 0) == 0
    found = next(one for one in compute_memory(job) if one.rank == 4)
    parts = next(phase.parts for phase in found.phases if phase.name == "rollout")
    assert parts["engine weights"] == count_engine_bytes(job) + staged[0]
    in_process = make_job(small_shape(), *SERVED[1:], "rollout.tensor_model_parallel_size=2")
    other = next(one for one in compute_memory(in_process) if one.rank == 4)
    assert found.kv_cache_bytes == other.kv_cache_bytes, "the server takes its share of the device without them"


@pytest.mark.parametrize("rate", [0.0, 1e-5])
def test_engines_that_draft_have_one_layer_more(rate: float) -> None:
    """In weights and cache, with the second form of up-projections; the last stage has it, too, or trains it."""
    shape = published_shape("DeepSeek-V3")
    given = ["rollout.tensor_model_parallel_size=8", "actor.pipeline_model_parallel_size=2", f"actor.mtp_lr={rate}"]
    given += [
        "actor.expert_model_parallel_size=32",
        "rollout.kv_cache_gib=4",
        "actor.num_layers_in_first_pipeline_stage=31",
    ]
    plain, drafting = (make_job(shape, *given, f"rollout.draft_tokens={n}", nodes=8) for n in (0, 1))
    layer = 2 * sum(box_volume(p.local_box) for p in vllm_placements(shape.mtp, tp_size=8, place=0))
    layer += 2 * math.prod(shape.kind_sizes()["kv_up"]) // 8
    assert count_engine_bytes(drafting) - count_engine_bytes(plain) == layer
    before, after = compute_memory(plain), compute_memory(drafting)
    caches = [find_smallest_cache(job, memory) for job, memory in ((plain, before), (drafting, after))]
    assert caches[1].kv_bytes_per_token * 61 == caches[0].kv_bytes_per_token * 62
    weights = [max(phase.parts.get("weights", 0) for phase in memory[-1].phases) for memory in (before, after)]
    assert (weights[1] > weights[0]) == (rate == 0)
