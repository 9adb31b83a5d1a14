# SPDX-License-Identifier: Apache-2.0
"""Bytes per link and predicted seconds against formulas worked out by hand.

Not covered: whether real steps take as long; the report labels its seconds as predictions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.cluster import Job
from megatron_rl.planning.memory import compute_memory
from megatron_rl.planning.parameters import Upkeep, compute_role_bytes, list_chunks
from megatron_rl.planning.throughput import count_operations
from megatron_rl.weights.families import ModelShape
from planning_jobs import PREFIXED, make_job, published_shape, small_shape
from tools.planning.communication import (
    ACROSS,
    WITHIN,
    Assumptions,
    Traffic,
    build_workload,
    compute_bubble,
    link_of,
    list_traffic,
    predict_step,
)
from tools.planning.switch import plan_switch

ASSUMED = Assumptions(mean_response=0.5, mean_prompt=0.25)
TOKENS = 512 * (128 + 256)  # responses of a step, mean prompt and response
HIDDEN, LAYERS, BYTES = 64, 8, 2
RECOMPUTE = "algorithm.old_logprobs=recompute"


def traffic(job: Job, stage: int = 0) -> dict[str, Traffic]:
    return {t.kind: t for t in list_traffic(job, build_workload(job, ASSUMED), stage)}


def test_workload() -> None:
    work = build_workload(make_job(small_shape(), "actor.ppo_mini_batch_size=16", "actor.ppo_epochs=2"), ASSUMED)
    assert work.tokens == TOKENS and work.optimizer_steps == 8 and work.passes == 2


def test_small_microbatches_wait_for_the_host_except_in_graphs() -> None:
    """Eight layers of 4 ms for each microbatch; full recomputation adds a third, and large layers hide it."""

    def update(*overrides: str, shape: ModelShape | None = None) -> float:
        job = make_job(shape or small_shape(), "actor.max_tokens_per_microbatch=4096", *overrides, gpus_per_node=1)
        work, memory = build_workload(job, ASSUMED), compute_memory(job)
        return predict_step(job, work, [], memory, 0.0, ASSUMED).phases["actor update"]

    host = TOKENS / 4096 * LAYERS * 0.004
    assert update() == update("actor.step_mode=static") == pytest.approx(host)
    assert update("actor.recompute_granularity=full") == pytest.approx(host * 4 / 3)
    assert update("actor.step_mode=graph") < host / 10
    large = published_shape("Qwen2.5-7B-Instruct")
    assert update(shape=large) == update("actor.step_mode=graph", shape=large)


def test_one_rank_sends_nothing() -> None:
    assert traffic(make_job(small_shape(), gpus_per_node=1)) == {}


def test_tensor_parallel_all_reduces() -> None:
    """Two per layer and pass over all tokens of the DP rank; log-probs, forward and backward are three passes.

    One more per pass is that of the embedding, or of the hidden states whose gradients the head gives. If the first
    pass of the update gives the log-probs, two are left; a reference is one more.
    """
    two_ranks = "actor.tensor_model_parallel_size=2"
    job = make_job(small_shape(), two_ranks, RECOMPUTE)
    ring = 2 * (2 - 1) / 2  # bytes that a ring all-reduce over two ranks sends, per byte
    one = TOKENS / 4 * HIDDEN * BYTES * ring
    expected = (2 * LAYERS + 1) * 3 * one
    assert traffic(job)["actor TP"].bytes_per_rank == expected
    for settings, passes in (([], 2), (["algorithm.kl_coef=0.1"], 3), (["algorithm.kl_coef=0.1", RECOMPUTE], 4)):
        found = traffic(make_job(small_shape(), two_ranks, *settings))["actor TP"].bytes_per_rank
        assert found == expected * passes / 3
    recomputed = make_job(small_shape(), two_ranks, RECOMPUTE, "actor.recompute_granularity=full")
    assert traffic(recomputed)["actor TP"].bytes_per_rank == (2 * LAYERS * 4 + 3) * one


def test_data_parallel_gradients_and_weights() -> None:
    """ZeRO-1 scatters float32 gradients and gathers bfloat16 weights, once per optimizer step."""
    job = make_job(small_shape(), "actor.ppo_mini_batch_size=32")
    role = compute_role_bytes(job.shape, job.layout, 0, dtype="bfloat16")
    assert traffic(job)["actor DP"].bytes_per_rank == int(2 * (role.gradients + role.parameters) * 7 / 8)


def test_shared_weights_are_gathered_by_every_microbatch() -> None:
    """ZeRO-3: twice in bfloat16 for each layer, once for the other parameters, and float32 gradients of both."""
    settings = "actor.zero_stage=3", "actor.max_tokens_per_microbatch=4096"
    (chunk,) = list_chunks(small_shape(), ParallelLayout(8), 0)
    layers = sum(p.numel for p in chunk if ".layers." in p.name)
    ends = sum(p.numel for p in chunk) - layers
    microbatches = TOKENS // 8 // 4096
    assert TOKENS % (8 * 4096) == 0 and microbatches >= 2
    update = microbatches * ((2 * layers + ends) * BYTES + 4 * (layers + ends))
    job = make_job(small_shape(), *settings)
    assert traffic(job)["actor DP"].bytes_per_rank == int(update * 7 / 8)
    scored = make_job(small_shape(), *settings, RECOMPUTE)
    forward = (microbatches * layers + ends) * BYTES
    assert traffic(scored)["actor DP"].bytes_per_rank == int((update + forward) * 7 / 8)


def test_replicas_of_shards_sum_their_gradients_once_per_update() -> None:
    """Weights are gathered within a node, and an update sends float32 gradients of a shard twice to the other node."""
    settings = "actor.zero_stage=3", "actor.max_tokens_per_microbatch=4096"
    one = make_job(small_shape(), *settings)
    two = make_job(small_shape(), *settings, "actor.zero_shard_size=8", nodes=2)
    sent = traffic(two)
    assert (sent["actor DP"].link, sent["actor replicas"].link) == (WITHIN, ACROSS)
    assert sent["actor DP"].bytes_per_rank == traffic(one)["actor DP"].bytes_per_rank / 2  # of half of the tokens
    role = compute_role_bytes(one.shape, one.layout, 0, dtype="bfloat16", upkeep=Upkeep(is_fully_sharded=True))
    found = compute_role_bytes(two.shape, two.layout, 0, dtype="bfloat16", upkeep=Upkeep(is_fully_sharded=True))
    assert found == role and sent["actor replicas"].bytes_per_rank == role.gradients
    again = traffic(make_job(two.shape, *settings, "actor.zero_shard_size=8", "actor.ppo_epochs=2", nodes=2))
    assert again["actor replicas"].bytes_per_rank == 2 * role.gradients and "actor replicas" not in traffic(one)


def test_pipeline_sends_its_boundary() -> None:
    job = make_job(small_shape(), "actor.pipeline_model_parallel_size=4", RECOMPUTE)
    assert traffic(job)["actor PP"].bytes_per_rank == 3 * TOKENS / 2 * HIDDEN * BYTES


def test_stages_between_two_others_have_neither_embedding_nor_head() -> None:
    settings = "actor.pipeline_model_parallel_size=4", "actor.tensor_model_parallel_size=2"
    job = make_job(small_shape(), *settings, RECOMPUTE)
    of_stage = [traffic(job, stage) for stage in range(4)]
    # All-reduces of a pass: two for each of two layers, and half of one for an embedding or a head.
    one = 3 * TOKENS * HIDDEN * BYTES  # three passes, and a ring over two ranks sends as many bytes as it reduces
    assert [t["actor TP"].bytes_per_rank / one for t in of_stage] == [4.5, 4, 4, 4.5]
    job = make_job(small_shape(), settings[0], "actor.ppo_mini_batch_size=32")
    sent = [traffic(job, stage)["actor DP"].bytes_per_rank for stage in range(4)]
    roles = [
        compute_role_bytes(job.shape, job.layout, job.layout.rank(pp=stage), dtype="bfloat16") for stage in range(4)
    ]
    assert sent == [int(2 * (role.gradients + role.parameters) / 2) for role in roles]
    assert sent[1] == sent[2] < sent[3]


def test_context_and_expert_exchanges() -> None:
    job = make_job(small_shape(), "actor.context_parallel_size=2", RECOMPUTE)
    heads = (2 * 8 + 2 * 4) * 8  # query and result, key and value
    assert traffic(job)["actor CP"].bytes_per_rank == LAYERS * 3 * heads * TOKENS / 8 * BYTES / 2
    experts = small_shape(
        model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True
    )
    job = make_job(experts, "actor.expert_model_parallel_size=4", RECOMPUTE)
    exchanged = LAYERS * 3 * 2 * TOKENS / 8 * (2 * HIDDEN + 1) * BYTES  # two experts each, with their shares
    assert traffic(job)["actor EP"].bytes_per_rank == exchanged * 3 / 4
    # Under TP the tokens of the neighbors come along. Experts have one replica here, and an optimizer of their own,
    # which gathers the other weights once more.
    settings = ("actor.tensor_model_parallel_size=2", "actor.sequence_parallel=true")
    job = make_job(experts, "actor.expert_model_parallel_size=4", *settings, RECOMPUTE)
    attention = (2 * LAYERS * 3.5 + 6) * TOKENS / 4 * HIDDEN * BYTES
    routers = 2 * 4 * (LAYERS * 8 * HIDDEN)  # whole on both ranks, which add up their gradients in float32
    assert traffic(job)["actor TP"].bytes_per_rank == (attention + 2 * exchanged + routers) / 2
    assert traffic(job)["actor EP"].bytes_per_rank == exchanged * 3 / 4
    whole = sum(p.numel for p in list_chunks(experts, job.layout, 0)[0] if not p.is_expert)
    assert traffic(job)["actor DP"].bytes_per_rank == pytest.approx(whole * (4 + 2 * BYTES) * 3 / 4, rel=1e-2)
    # Experts that are whole on a rank may be spread over more ranks than a dense layer has replicas.
    whole_experts = "actor.expert_model_parallel_size=8", "actor.expert_tensor_parallel_size=1"
    job = make_job(experts, *whole_experts, *settings, RECOMPUTE)
    assert traffic(job)["actor DP"].bytes_per_rank == pytest.approx(whole * (4 + 2 * BYTES) * 3 / 4, rel=1e-2)


def test_dense_layers_before_experts_exchange_no_tokens() -> None:
    """The last five of eight layers do; under TP their shared expert takes as many all-reduces as a dense MLP."""
    settings = ("actor.tensor_model_parallel_size=2", "actor.sequence_parallel=true", RECOMPUTE)
    job = make_job(small_shape(**PREFIXED), "actor.expert_model_parallel_size=4", *settings)
    exchanged = 5 * 3 * 2 * TOKENS / 4 * (2 * HIDDEN + 1) * BYTES
    assert traffic(job)["actor EP"].bytes_per_rank == exchanged / 2 * 3 / 4
    attention_and_mlp = (4 * LAYERS * 3.5 + 6) * TOKENS / 4 * HIDDEN * BYTES
    routers = 2 * 4 * (5 * 4 * HIDDEN)
    assert traffic(job)["actor TP"].bytes_per_rank == (attention_and_mlp + exchanged + routers) / 2


@pytest.mark.parametrize(
    ("sizes", "axes", "link"),
    [
        (dict(tp_size=8), ("tp",), WITHIN),
        (dict(tp_size=8, pp_size=2), ("pp",), ACROSS),
        (dict(tp_size=4, cp_size=2), ("cp",), WITHIN),
        (dict(tp_size=4, cp_size=2), ("cp", "dp"), ACROSS),
    ],
)
def test_link_classes(sizes: dict[str, int], axes: tuple[str, ...], link: str) -> None:
    job = make_job(small_shape(), nodes=2)
    assert link_of(ParallelLayout(16, **sizes), job.cluster, *axes) == link


def test_switch_moves_what_the_engine_lacks() -> None:
    """From TP 2 to TP 1 every rank lacks the other half of the split matrices; from TP 1 to TP 1 nothing."""
    assert plan_switch(make_job(small_shape())).summary.bytes_moved == 0
    shared = plan_switch(make_job(small_shape(), "actor.zero_stage=3", gpus_per_node=2)).summary
    assert shared.bytes_moved == sum(math.prod(size) for size in small_shape().logical_tensors().values()) * BYTES
    job = make_job(small_shape(), "actor.tensor_model_parallel_size=2", gpus_per_node=2)
    q, kv, ffn = 64 * 64, 32 * 64, 96 * 64
    split = LAYERS * (2 * q + 2 * kv + 3 * ffn) + 2 * 512 * 64
    found = plan_switch(job)
    assert found.summary.bytes_moved == 2 * split / 2 * BYTES  # two ranks, half of it each
    assert found.prediction.seconds == pytest.approx(split / 2 * BYTES / 400e9)


def test_bubble_of_a_pipeline() -> None:
    """(pp - 1) / (vpp m): 512 responses on 2 ranks of 384 tokens, 4096 per microbatch: 24 microbatches."""
    job = make_job(small_shape(), "actor.pipeline_model_parallel_size=4")
    work = build_workload(job, ASSUMED)
    assert compute_bubble(work, job.layout, job.config.actor) == pytest.approx(3 / 24)
    interleaved = replace(job.config.actor, virtual_pipeline_model_parallel_size=2)
    assert compute_bubble(work, replace(job.layout, vpp_size=2), interleaved) == pytest.approx(3 / 48)


def test_a_pipeline_runs_at_the_pace_of_its_slowest_stage() -> None:
    """28 layers on four stages; the last computes the head besides, unless it has fewer layers."""
    shape = published_shape("Qwen2.5-7B-Instruct")
    layers = count_operations(replace(shape, has_score_head=True), 384) / 28
    head = count_operations(shape, 384) - 28 * layers
    found = []
    for text, slowest in (
        ("(t*7|)*3t*7", 7 * layers + head),
        ("t*10|t*7|t*7|t*4", 10 * layers),
        ("(t*8|)*3t*4", 8 * layers),
    ):
        string = f"actor.pipeline_model_parallel_layout=E{text}L"
        job = make_job(shape, "actor.pipeline_model_parallel_size=4", string, nodes=1)
        work, assumed = build_workload(job, ASSUMED), replace(ASSUMED, layer_overhead=0.0)
        seconds = predict_step(job, work, [], compute_memory(job), 0.0, assumed).phases["actor update"]
        pace = 1 + compute_bubble(work, job.layout, job.config.actor)
        assert seconds == pytest.approx(3 * TOKENS * 4 * slowest / 8 / (0.4 * 990e12) * pace)
        found.append(seconds)
    assert min(found) == found[2]


APART = ["placement.actor=0-3", "placement.reference=4-5", "placement.critic=4-5", "placement.rollout=6-7"]


def test_roles_on_ranks_of_their_own_take_their_ranks_time() -> None:
    """Four ranks train for twice as long as eight; phases that begin together overlap."""
    ppo = ["algorithm.adv_estimator=gae", "algorithm.kl_coef=0.1", "critic.lr=1e-5", RECOMPUTE]
    shape, found = published_shape("Qwen2.5-7B-Instruct"), {}
    for name, settings in (("together", []), ("apart", APART)):
        job = make_job(shape, *ppo, *settings)
        work = build_workload(job, ASSUMED)
        found[name] = predict_step(job, work, [], compute_memory(job), 0.0, ASSUMED)
    together, apart = found["together"].phases, found["apart"].phases
    forward = together["log-probs"] / 2  # of the policy, and of the reference
    assert found["together"].overlap == 0.0
    assert apart["actor update"] == pytest.approx(2 * together["actor update"])
    assert apart["log-probs"] == pytest.approx((2 + 4) * forward)
    assert apart["critic"] == pytest.approx(4 * together["critic"])
    assert apart["rollout"] > together["rollout"]
    values, updates = together["critic"] / 4, 4 * together["critic"] * 3 / 4
    # The policy's log-probs are done while the other ranks compute the reference's and the values.
    at_work = 4 * forward + 4 * values + max(apart["actor update"], updates)
    assert found["apart"].total == pytest.approx(apart["rollout"] + at_work)


def test_ranks_of_their_own_send_for_their_role() -> None:
    """Gradients of the critic among its two ranks, activations of the actor inside its four; a node has four here."""
    sizes = ["actor.tensor_model_parallel_size=4", "actor.sequence_parallel=true", "algorithm.adv_estimator=gae"]
    sizes += ["algorithm.kl_coef=0.1", "critic.lr=1e-5", "rollout.tensor_model_parallel_size=2", RECOMPUTE]
    apart = [text.replace("reference=4-5", "reference=0-3") for text in APART]
    job = make_job(small_shape(), *sizes, *apart, nodes=2, gpus_per_node=4)
    found = traffic(job)
    critic = compute_role_bytes(job.shapes["critic"], job.layout_of(job.spec.roles["critic"]), 4, dtype="bfloat16")
    assert found["critic DP"].bytes_per_rank == int(8 * (critic.gradients + critic.parameters) / 2) / 8
    assert found["actor TP"].link == found["critic DP"].link == found["engine TP"].link == WITHIN
    assert found["engine TP"].bytes_per_rank == int(4 * LAYERS * TOKENS * HIDDEN * BYTES / 2)
    assert "actor DP" not in found and "reference TP" not in found
    moved = plan_switch(job).summary
    assert moved.bytes_across_nodes == moved.bytes_moved > 0 and moved.bytes_kept == 0


def test_operations_per_token_are_twice_the_weights() -> None:
    """Without attention; of a mixture of experts, those that serve a token."""
    dense = published_shape("Qwen2.5-7B-Instruct")
    assert count_operations(dense, 0) / 2 == pytest.approx(7.07e9, rel=0.01)  # 7.61e9 without the embedding
    assert count_operations(published_shape("Qwen3-30B-A3B"), 0) / 2 == pytest.approx(3.05e9, rel=0.02)


def test_seconds_follow_operations_and_memory() -> None:
    """Twice the accelerators' speed halves training; twice their bandwidth shortens decoding, and nothing else."""

    def predict(*settings: str, **cluster: float) -> dict[str, float]:
        shape = published_shape("Qwen2.5-7B-Instruct")
        job = make_job(shape, "actor.tensor_model_parallel_size=4", *settings, **cluster)
        work, assumed = build_workload(job, ASSUMED), replace(ASSUMED, layer_overhead=0.0)
        return predict_step(job, work, [], compute_memory(job), 0.0, assumed).phases

    usual, fast, wide = predict(), predict(flops=2 * 990e12), predict(memory_bandwidth=2 * 3.35e12)
    assert fast["actor update"] == pytest.approx(usual["actor update"] / 2)
    assert wide["rollout"] < usual["rollout"] and wide["actor update"] == usual["actor update"]
    operations = 3 * TOKENS * count_operations(published_shape("Qwen2.5-7B-Instruct"), 384) / 8
    assert usual["actor update"] == pytest.approx(operations / (0.4 * 990e12))
    assert usual["log-probs"] == 0.0
    assert predict(RECOMPUTE)["log-probs"] == pytest.approx(usual["actor update"] / 3)
