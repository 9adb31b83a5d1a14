# SPDX-License-Identifier: Apache-2.0
"""Layouts that fit, the nearest of them, and the message about one that does not.

Not covered: whether the ranking is that of real steps; seconds are predictions and labeled so.
"""

from __future__ import annotations

from functools import partial

import pytest

from megatron_rl.planning.admission import check_job, describe_choice, find_nearest, find_problem, list_candidates
from megatron_rl.planning.cluster import GIB, Job
from megatron_rl.planning.memory import compute_memory
from megatron_rl.types import UserError
from planning_jobs import make_job, published_shape, small_shape
from tools.planning.communication import Assumptions, predict_seconds

ASSUMED = Assumptions()


def candidates(job: Job) -> list:
    return list_candidates(job, partial(predict_seconds, ASSUMED))


@pytest.mark.parametrize(
    ("name", "nodes", "extra"),
    [
        ("Qwen2.5-7B-Instruct", 1, ("actor.offload_gradients=true",)),
        ("Qwen3-30B-A3B", 2, ()),
        (
            "Qwen2.5-7B-Instruct",
            2,
            (
                "algorithm.adv_estimator=gae",
                "algorithm.kl_coef=0.1",
                "actor.context_parallel_size=2",
                "critic.context_parallel_size=2",
            ),
        ),
    ],
)
def test_every_candidate_is_accepted_and_fits(name: str, nodes: int, extra: tuple[str, ...]) -> None:
    """Its overrides, typed at the recipe, give a job that the run's own checks accept and that fits."""
    shape = published_shape(name)
    job = make_job(shape, *extra, nodes=nodes)
    found = candidates(job)
    assert len(found) > 5 and [c.seconds for c in found] == sorted(c.seconds for c in found)
    for candidate in found[::7]:
        again = make_job(shape, *extra, *candidate.choice.overrides(job), nodes=nodes)
        assert describe_choice(again) == candidate.choice and again.config == candidate.job.config
        check_job(again)
        assert find_problem(again, compute_memory(again)) is None
        assert candidate.headroom >= 0


def test_what_does_not_fit_is_named_with_phase_rank_and_amount() -> None:
    job = make_job(published_shape("Qwen2.5-72B-Instruct"), nodes=8)
    memory = compute_memory(job)
    problem = find_problem(job, memory)
    [rank] = memory
    assert problem.phase == rank.peak.name and problem.excess == rank.peak.total - 80 * GIB
    assert f"{problem.excess / GIB:.1f} GiB too many" in problem.found and "rank 0" in problem.found


def test_a_kv_cache_without_room_for_one_response_does_not_fit() -> None:
    job = make_job(
        published_shape("Qwen2.5-7B-Instruct"), "rollout.kv_cache_gib=0.01", "actor.tensor_model_parallel_size=4"
    )
    problem = find_problem(job, compute_memory(job))
    assert problem.phase == "rollout" and "KV cache" in problem.found
    # keys and values of 28 layers, 4 heads of 128, two bytes each, 1024 tokens
    assert problem.excess == 2 * 28 * 4 * 128 * 2 * 1024 - int(0.01 * GIB)


def test_the_nearest_changes_one_thing_where_one_is_enough() -> None:
    """72B on 64 GPUs of 80 GiB, TP 8: two pipeline stages hold it, and nothing else need change."""
    job = make_job(
        published_shape("Qwen2.5-72B-Instruct"),
        "actor.tensor_model_parallel_size=8",
        "actor.sequence_parallel=true",
        "actor.recompute_granularity=full",
        "rollout.tensor_model_parallel_size=8",
        nodes=8,
    )
    assert find_problem(job, compute_memory(job)) is not None
    nearest = find_nearest(job, candidates(job))
    assert nearest.choice.overrides(job) == ["actor.pipeline_model_parallel_size=2"]


def test_nothing_fits() -> None:
    job = make_job(published_shape("Qwen2.5-72B-Instruct"), memory_gib=24)
    assert candidates(job) == [] and find_nearest(job, []) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("actor.tensor_model_parallel_size=8",), "KV heads"),
        (("actor.pipeline_model_parallel_size=8", "actor.ppo_mini_batch_size=60"), "ppo_mini_batch_size"),
        (("actor.context_parallel_size=8", "actor.tensor_model_parallel_size=1"), None),
        (("rollout.tensor_model_parallel_size=3",), "world_size"),
        (
            (
                *("actor.step_mode=graph", "actor.pipeline_model_parallel_size=2"),
                "actor.pipeline_model_parallel_layout=Ett|tt|tt|ttL",
            ),
            "actor.step_mode = graph with a llama model in the layout tp=1 pp=2 dp=4 vpp=2",
        ),
    ],
)
def test_what_the_run_refuses_is_no_plan(overrides: tuple[str, ...], message: str | None) -> None:
    job = make_job(small_shape(), *overrides)
    if message is None:
        check_job(job)
        return
    with pytest.raises(UserError, match=message):
        check_job(job)


@pytest.mark.parametrize(
    ("stages", "layout", "chunks"),
    [
        ("actor.virtual_pipeline_model_parallel_size=2", "Et*7|(t*7|)*2t*7L", 2),
        ("actor.num_layers_in_first_pipeline_stage=12", "Et*12|t*16L", 1),
    ],
)
def test_other_roles_divide_their_layers_as_the_actor_by_a_string(stages: str, layout: str, chunks: int) -> None:
    pipelines = [f"{role}.pipeline_model_parallel_size=2" for role in ("actor", "critic")]
    shape, given = published_shape("Qwen2.5-7B-Instruct"), ("algorithm.adv_estimator=gae", *pipelines, stages)
    job = make_job(shape, *given)
    own = next(c for c in candidates(job) if c.choice.pipeline_model_parallel_size == 2)
    assert f"critic.pipeline_model_parallel_layout={layout}" in own.choice.overrides(job)
    again = make_job(shape, *given, *own.choice.overrides(job))
    assert again.layout_of(again.spec.roles["critic"]).vpp_size == again.layout.vpp_size == chunks
    assert again.config == own.job.config


def test_moments_that_are_streamed_stay_so_in_every_candidate() -> None:
    """The candidate with the job's own layout has the memory of the job."""
    layout = ("actor.tensor_model_parallel_size=2", "actor.sequence_parallel=true")
    options = ("actor.offload_gradients=true", "actor.offload_optimizer=stream", "reference.offload=true")
    job = make_job(published_shape("Qwen2.5-7B-Instruct"), *layout, *options)
    found = candidates(job)
    assert {c.job.config.actor.offload_optimizer for c in found} == {"stream"}
    [own] = [c for c in found if not c.choice.overrides(job)]
    assert own.worst_phase == max((rank.peak for rank in compute_memory(job)), key=lambda peak: peak.total)
