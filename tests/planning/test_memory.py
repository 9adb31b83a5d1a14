# SPDX-License-Identifier: Apache-2.0
"""Phases of a run and the memory in each of them, and shortcuts of the planner against the long way.

Not covered here: the sizes themselves (test_parameters.py exactly, test_peak_memory.py with activations), GPUs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import megatron_rl.planning.memory as memory_module
from megatron_rl.parallel.layout import ParallelLayout
from megatron_rl.planning.admission import find_problem
from megatron_rl.planning.cluster import GIB, Job
from megatron_rl.planning.memory import MemoryPhase, compute_memory, count_microbatches, count_passes_in_flight
from megatron_rl.planning.parameters import compute_engine_bytes, compute_role_bytes, count_aliased_elements
from megatron_rl.weights.megatron_layout import choose_chunk_tokens, megatron_placements
from megatron_rl.weights.rollout_layout import vllm_placements
from megatron_rl.weights.shard_box import find_aliases
from planning_jobs import PREFIXED, make_job, published_shape, small_shape
from tools.planning.switch import plan_switch

RECOMPUTE = "algorithm.old_logprobs=recompute"
PPO = ("algorithm.adv_estimator=gae", "reward_model.path=elsewhere")


def phases(job: Job, rank: int = 0) -> dict[str, MemoryPhase]:
    return {phase.name: phase for phase in compute_memory(job)[rank].phases}


def test_each_role_adds_its_phases() -> None:
    common = ["engine start", "switch", "rollout", "log-probs", "actor update"]
    assert "log-probs" not in phases(make_job(small_shape())), "the first pass of the update gives them"
    assert list(phases(make_job(small_shape(), RECOMPUTE))) == common
    found = phases(make_job(small_shape(), *PPO, RECOMPUTE))
    assert list(found) == [*common[:3], "values", "critic update", "rewards", *common[3:]]
    assert "reference" not in found["log-probs"].parts
    assert "reference" in phases(make_job(small_shape(), "algorithm.kl_coef=0.1"))["log-probs"].parts


def test_a_teacher_has_a_phase_and_leaves_columns() -> None:
    """Its weights in its own layout, on the host while other roles work; the policy has its scores of all tokens."""
    teacher = ("teachers.big.path=somewhere", "teachers.big.tensor_model_parallel_size=4", "teachers.big.offload=true")
    job = make_job(small_shape(), *teacher, "algorithm.distillation.kind=top_k", "algorithm.distillation.k=31")
    found = phases(job)
    layout = job.layout_of(job.spec.roles["teachers.big"])
    weights = compute_role_bytes(job.shape, layout, 0, dtype="bfloat16", is_trained=False).parameters
    assert layout.tp_size == 4 and found["teacher big"].parts["teacher big"] == weights
    assert "teacher big" not in found["rollout"].parts and compute_memory(job)[0].host_bytes == weights
    tokens = 64 * 8 * 512 // job.layout.dp_size
    assert found["actor update"].parts["teachers' columns"] == tokens * 2 * 32 * 4
    sampled = make_job(small_shape(), "teachers.big.path=somewhere")
    assert phases(sampled)["actor update"].parts["teachers' columns"] == tokens * 4
    assert "log-probs" in phases(sampled), "old_logprobs are read before the update"


def test_a_role_at_work_has_everything_and_one_that_waits_what_is_not_offloaded() -> None:
    job = make_job(
        small_shape(),
        *PPO,
        "algorithm.kl_coef=0.1",
        "actor.offload_gradients=true",
        "actor.offload_optimizer=true",
        "reference.offload=true",
        "reward_model.offload=true",
    )
    found = phases(job)
    actor = compute_role_bytes(job.shape, job.layout, 0, dtype="bfloat16")
    critic = compute_role_bytes(job.shapes["critic"], job.layout, 0, dtype="bfloat16")
    weights_only = compute_role_bytes(job.shape, job.layout, 0, dtype="bfloat16", is_trained=False).parameters
    assert found["rollout"].parts["weights"] == actor.parameters
    assert not {"gradients", "optimizer", "reference", "reward model"} & found["rollout"].parts.keys()
    assert found["rollout"].parts["critic"] == critic.parameters + critic.optimizer
    assert found["critic update"].parts["critic"] == critic.total
    assert found["values"].parts["critic"] == critic.parameters + critic.optimizer, "its gradients stay away"
    # The second minibatch of a step finds all that the first has taken back.
    assert found["critic update"].parts["optimizer"] == actor.optimizer
    update = found["actor update"].parts
    assert (update["gradients"], update["optimizer"]) == (actor.gradients, actor.optimizer)
    assert found["log-probs"].parts["reference"] == weights_only
    assert "reference" not in found["actor update"].parts


def test_what_is_offloaded_is_planned_on_the_host() -> None:
    """The sum over the roles, times the ranks of a node, against the node's memory if given."""
    offload = (
        "actor.offload_optimizer=true",
        "critic.offload_optimizer=true",
        "reference.offload=true",
        "reward_model.offload=true",
        "algorithm.kl_coef=0.1",
    )
    assert [rank.host_bytes for rank in compute_memory(make_job(small_shape(), *PPO))] == [0]
    job = make_job(small_shape(), *PPO, *offload)
    actor, critic = (
        compute_role_bytes(shape, job.layout, 0, dtype="bfloat16") for shape in (job.shape, job.shapes["critic"])
    )
    reference, reward = (
        compute_role_bytes(shape, job.layout, 0, dtype="bfloat16", is_trained=False).parameters
        for shape in (job.shape, job.shapes["reward_model"])
    )
    (rank,) = compute_memory(job)
    assert rank.host_bytes == actor.optimizer + critic.optimizer + reference + reward
    assert find_problem(job, [rank]) is None
    for room, fits in ((8 * rank.host_bytes, True), (8 * rank.host_bytes - 1, False)):
        problem = find_problem(replace(job, cluster=replace(job.cluster, host_memory_bytes=room)), [rank])
        assert (problem is None) is fits
    assert problem.phase == "offload" and problem.excess == 1 and "what 8 ranks of a node offload" in problem.found


def test_float32_on_a_gpu_keeps_repeated_heads() -> None:
    """Four of eight heads are repeated: 64 elements for keys and 64 for values, per token and layer."""

    def activations(dtype: str, kv_heads: int, tokens: int) -> int:
        job = make_job(
            small_shape(num_key_value_heads=kv_heads),
            f"model.dtype={dtype}",
            f"actor.max_tokens_per_microbatch={tokens}",
        )
        return phases(job)["actor update"].parts["activations"]

    def without_repeats(dtype: str, tokens: int) -> int:
        # With as many heads of keys and values, each keeps 3 kv = 192 elements instead of 96.
        return activations(dtype, 8, tokens) - 8 * tokens * (192 - 96) * (4 if dtype == "float32" else 2)

    assert activations("bfloat16", 4, 4096) == without_repeats("bfloat16", 4096)
    assert activations("float32", 4, 4096) == without_repeats("float32", 4096) + 8 * 4096 * 128 * 4


@pytest.mark.parametrize(
    ("sizes", "num_microbatches", "passes"),
    [
        (dict(pp_size=4), 8, [4, 3, 2, 1]),
        (dict(pp_size=4), 2, [2, 2, 2, 1]),
        (dict(pp_size=4, vpp_size=2), 8, [11, 9, 7, 5]),
        (dict(pp_size=4, vpp_size=3), 8, [15, 13, 11, 9]),
        (dict(pp_size=2, vpp_size=2), 2, [4, 3]),
    ],
)
def test_passes_in_flight(sizes: dict[str, int], num_microbatches: int, passes: list[int]) -> None:
    """Counted in megatron-core's schedules: warm-up passes and one more; no more than there are."""
    layout = ParallelLayout(4, **sizes)
    assert [count_passes_in_flight(layout, stage, num_microbatches) for stage in range(layout.pp_size)] == passes


def test_kv_cache_is_what_the_engine_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of the device minus the engine's own weights and activations, or the configured size."""
    monkeypatch.setattr("megatron_rl.planning.parameters.count_aliased_elements", lambda *_: 0)
    job = make_job(small_shape(), "rollout.gpu_memory_utilization=0.25")
    [memory] = compute_memory(job)
    rollout = memory.phases[2]
    own = compute_engine_bytes(job.shape, 1, 2)
    assert rollout.parts["engine weights"] == own
    assert memory.kv_cache_bytes == 20 * GIB - own - rollout.parts["engine activations"]
    assert memory.kv_bytes_per_token == 2 * 8 * 4 * 8 * 2  # keys and values, layers, KV heads, head size, bytes
    [memory] = compute_memory(make_job(small_shape(), "rollout.kv_cache_gib=3"))
    assert memory.kv_cache_bytes == 3 * GIB
    halved = compute_memory(make_job(small_shape(), "rollout.tensor_model_parallel_size=2"))[0].kv_bytes_per_token
    replicated = compute_memory(make_job(small_shape(), "rollout.tensor_model_parallel_size=8"))[0].kv_bytes_per_token
    assert (halved, replicated) == (memory.kv_bytes_per_token // 2, memory.kv_bytes_per_token // 4)


def test_an_engine_that_is_the_policy_has_a_cache_only() -> None:
    """Of the layers and heads of its rank, and no larger than all sequences need."""
    sizes = [f"actor.{name}_model_parallel_size=2" for name in ("tensor", "pipeline")]
    job = make_job(small_shape(), "rollout.engine=megatron", "rollout.max_num_seqs=4", *sizes)
    memory, data = compute_memory(job)[0], job.config.data
    assert "engine weights" not in memory.phases[2].parts
    assert memory.kv_bytes_per_token == 2 * 4 * 2 * 8 * 2  # keys and values, layers, KV heads, head size, bytes
    assert memory.kv_cache_bytes == memory.kv_bytes_per_token * 4 * (data.max_prompt_length + data.max_response_length)
    assert plan_switch(job).summary.bytes_moved == 0


def test_equal_layouts_share_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine's TP the actor's, nothing of the engine's weights is its own."""
    job = make_job(small_shape(), "actor.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2")
    assert "engine weights" not in phases(job)["rollout"].parts
    monkeypatch.setattr("megatron_rl.planning.parameters.count_aliased_elements", lambda *_: 0)
    assert phases(job)["rollout"].parts["engine weights"] == compute_engine_bytes(job.shape, 2, 2)


@pytest.mark.parametrize("sizes", [dict(), dict(tp_size=2), dict(tp_size=2, pp_size=2), dict(pp_size=4, vpp_size=2)])
@pytest.mark.parametrize("rollout_tp", [1, 2])
@pytest.mark.parametrize(
    "changes", [dict(), dict(model_type="qwen2", tie_word_embeddings=True, vocab_size=517), PREFIXED]
)
def test_shared_elements_are_those_of_the_whole_tables(sizes: dict, rollout_tp: int, changes: dict) -> None:
    """The planner reads them off a few layers; here every pair of the full tables is added up."""
    shape, layout = small_shape(**changes), ParallelLayout(8, **sizes)
    for rank in (0, 7):
        theirs = vllm_placements(shape, tp_size=rollout_tp, place=rank % rollout_tp)
        ours = megatron_placements(shape, layout, rank)
        pairs, expected = find_aliases(ours, theirs), 0
        for placement in theirs:
            if placement.param in pairs:
                expected += math.prod(stop - start for start, stop in placement.local_box)
        assert count_aliased_elements(shape, layout, rank, rollout_tp, rank % rollout_tp) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.pipeline_model_parallel_size=4",),
        ("actor.pipeline_model_parallel_size=2", "actor.virtual_pipeline_model_parallel_size=2"),
        (*PPO, "actor.pipeline_model_parallel_size=2", "critic.pipeline_model_parallel_size=4"),
    ],
)
def test_one_rank_of_each_stage_stands_for_all(overrides: tuple[str, ...]) -> None:
    """No rank takes more than the fullest that is looked at, beyond the padding of buffers."""
    job = make_job(small_shape(), *overrides)
    everyone = [memory_module._compute_rank(job, rank) for rank in range(8)]
    fullest = max(rank.peak.total for rank in everyone)
    assert fullest == pytest.approx(max(rank.peak.total for rank in compute_memory(job)), rel=1e-3)


def test_microbatches_of_full_responses() -> None:
    """512 responses of 1024 tokens, four in a budget, on eight ranks: sixteen; with VPP a multiple of the pipeline."""
    job = make_job(small_shape())
    assert count_microbatches(job, job.layout, job.config.actor) == 16
    layout = ParallelLayout(8, pp_size=4, vpp_size=2)
    assert count_microbatches(job, layout, job.config.actor) == 64
    odd = replace(job.config.actor, ppo_mini_batch_size=10, max_tokens_per_microbatch=7168)
    job = replace(job, config=replace(job.config, actor=odd))
    assert count_microbatches(job, layout, odd) == 8  # 80 responses on 2 ranks, 7 at a time: 6; of 4 the next is 8


def test_roles_on_ranks_of_their_own_take_memory_there_only() -> None:
    """One rank per combination of roles, stages and places in an engine; a role takes its usual memory there."""
    settings = ["algorithm.adv_estimator=gae", "algorithm.kl_coef=0.1", "rollout.tensor_model_parallel_size=2"]
    settings += ["actor.pipeline_model_parallel_size=2", "critic.lr=1e-5"]
    placement = ["placement.actor=0-3", "placement.critic=4-5", "placement.reference=4-5", "placement.rollout=6-7"]
    found = {rank.rank: rank for rank in compute_memory(make_job(small_shape(), *settings, *placement))}
    assert sorted(found) == [0, 2, 4, 5, 6, 7], (
        "two stages of the actor, two of the reference, two places in the engine"
    )
    alone = make_job(small_shape(), *settings, gpus_per_node=4)
    actor = {phase.name: phase for phase in compute_memory(alone)[0].phases}["actor update"].parts
    parts = {rank: {phase.name: phase.parts for phase in found[rank].phases} for rank in found}
    assert all(parts[0]["actor update"][kind] == actor[kind] for kind in ("weights", "gradients", "optimizer"))
    assert "critic" not in parts[0]["actor update"] and "engine weights" not in parts[0]["switch"]
    assert parts[4]["critic update"]["critic"] > 0 < parts[4]["log-probs"]["reference"]
    assert "weights" not in parts[4]["critic update"] and "activations" in parts[4]["log-probs"]
    assert set(parts[6]["rollout"]) == {"engine weights", "engine activations", "KV cache"}
    assert found[4].kv_cache_bytes == 0 < found[6].kv_cache_bytes == found[7].kv_cache_bytes


@pytest.mark.parametrize(
    ("vocab_size", "tp_size", "gib", "tokens"),
    [
        (151936, 1, None, 512),  # no GPU
        (151936, 1, 24, 512),  # more than a 40th
        (151936, 1, 80, 1024),
        (151936, 2, 80, 2048),
        (151936, 4, 80, 4096),
        (151936, 8, 141, 8192),
        (32000, 8, 80, 8192),
    ],
)
def test_tokens_whose_logits_exist_at_once(vocab_size: int, tp_size: int, gib: int | None, tokens: int) -> None:
    """A power of two whose logits, two float32 copies and a gradient, take at most a 40th of a GPU."""
    memory = None if gib is None else gib * GIB
    assert choose_chunk_tokens(vocab_size, tp_size, memory) == tokens
    if memory is not None and tokens > 512:
        assert tokens * vocab_size / tp_size * 12 <= memory / 40 or tokens == 8192


def test_the_plan_has_the_chunks_of_the_run() -> None:
    chosen, given = (
        phases(make_job(published_shape("Qwen2.5-7B-Instruct"), *overrides))["actor update"].parts["logits"]
        for overrides in ((), ("actor.logprob_chunk_tokens=1024",))
    )
    assert chosen == given


def test_inputs_of_layers_on_the_host() -> None:
    """Per layer a full microbatch of hidden states in bfloat16; the GPU, fullest at the logits, has none of them."""
    full, offload = (
        compute_memory(make_job(small_shape(), f"actor.recompute_granularity={kind}", gpus_per_node=1))[0]
        for kind in ("full", "offload")
    )
    moved = small_shape().num_layers * 4096 * small_shape().hidden_size * 2
    assert offload.host_bytes - full.host_bytes == moved
    update = [next(p for p in rank.phases if p.name == "actor update").parts for rank in (full, offload)]
    assert update[0]["activations"] - update[1]["activations"] == moved


def test_graphs_hold_the_activations_of_an_update_in_every_later_phase() -> None:
    eager, graph = (
        phases(make_job(small_shape(), RECOMPUTE, f"actor.step_mode={mode}")) for mode in ("eager", "graph")
    )
    update = eager["actor update"].parts
    pool = update["activations"] + update["logits"]
    assert {name: graph[name].total - phase.total for name, phase in eager.items()} == {
        "engine start": 0,
        "switch": pool,
        "rollout": pool,
        "log-probs": pool,
        "actor update": 0,
    }
    bounded = phases(make_job(small_shape(), RECOMPUTE, "actor.step_mode=graph", "actor.graph_memory_gib=0.001"))
    assert bounded["rollout"].parts["graphs"] == int(0.001 * GIB) < pool
