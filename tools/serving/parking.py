# SPDX-License-Identifier: Apache-2.0
"""Copies of a policy's state on the host, so that several models take turns in one policy, and adapters of each.

A state is everything that training changes on this rank: trained weights, float32 masters, the optimizer's moments, the
numbers of steps, and gradients that no step has used. It is exchanged in place, as captured steps hold addresses.

Adapters of a smaller rank, or of fewer matrices, are zero in the rest, where A and B have no gradient and stay zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_rl.checkpoint.peft import PREFIX, WEIGHTS_FILE
from megatron_rl.checkpoint.pieces import load_weights
from megatron_rl.models.stages import local_values
from megatron_rl.run.primitives import Policy
from megatron_rl.training.adapted_model import draw_initial
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.training.packed_model import PackedModel
from megatron_rl.weights.shard_box import box_slices
from tools.serving.request_checks import Lora
from tools.serving.wire import refuse

Weights = list[torch.Tensor]


def _list_weights(model: PackedModel) -> Weights:
    """List the adapters and their scale, or all parameters: router biases change without a gradient."""
    weights = [local_values(p) for p in model.stages.parameters() if p.requires_grad or model.adapters is None]
    return weights if model.adapters is None else [*weights, model.adapters.live_scale]


def _list_params(optimizer: Optimizer) -> list[tuple[Any, torch.Tensor]]:
    """List each Adam with each of its parameters."""
    return [(adam, param) for adam in optimizer.adams for group in adam.param_groups for param in group["params"]]


def _list_masters(model: PackedModel, optimizer: Optimizer) -> Weights:
    """List the parameters that Adam updates, without those that share storage with the model's."""
    of_model = {values.untyped_storage().data_ptr() for values in _list_weights(model)}
    found = [local_values(param) for _, param in _list_params(optimizer)]
    return [values for values in found if values.untyped_storage().data_ptr() not in of_model]


def _list_gradients(model: PackedModel, optimizer: Optimizer) -> Weights:
    """List the buffers in which gradients add up."""
    modules: list[Any] = [*model.ddp]
    buffers = [buffer for module in modules for buffer in (*module.buffers, *module.expert_parallel_buffers)]
    if modules:
        return [buffer.grad_data for buffer in buffers]
    return [local_values(param.grad) for _, param in _list_params(optimizer) if param.grad is not None]


def _copy(tensors: Any) -> Weights:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def _put(tensors: Any, copies: Weights) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy)


def copy_weights(model: PackedModel) -> Weights:
    """Return copies of this rank's trained weights."""
    return _copy(_list_weights(model))


def put_weights(model: PackedModel, weights: Weights) -> None:
    """Write copied weights into the model; its optimizer's masters stay as they are."""
    _put(_list_weights(model), weights)


@dataclass(frozen=True)
class PolicyState:
    """A model's state on this rank.

    Attributes:
        moments: name -> value for each parameter of Adam; empty before the first step.
        schedule: steps of the learning rate's schedule.
        gradients: buffers with the gradients of `passes`; `None` if there are none.
    """

    weights: Weights
    masters: Weights
    moments: list[dict[str, torch.Tensor]]
    steps: int
    schedule: int
    gradients: Weights | None
    passes: list[Any]


def copy_state(policy: Policy) -> PolicyState:
    """Return a copy of the state of the policy."""
    model, optimizer, update = policy.model, policy.role.optimizer, policy.role.update
    optimizer.restore()
    moments = [dict(zip(adam.state[p], _copy(adam.state[p].values()))) for adam, p in _list_params(optimizer)]
    return PolicyState(
        copy_weights(model),
        _copy(_list_masters(model, optimizer)),
        moments,
        optimizer.steps,
        optimizer.scheduler.num_steps,
        _copy(_list_gradients(model, optimizer)) if optimizer.has_gradients else None,
        update.passes,
    )


def put_state(policy: Policy, state: PolicyState) -> None:
    """Write a copied state into the policy."""
    model, optimizer, update = policy.model, policy.role.optimizer, policy.role.update
    optimizer.restore()
    put_weights(model, state.weights)
    _put(_list_masters(model, optimizer), state.masters)
    _put_moments(optimizer, state.moments)
    optimizer.resume(state.steps, {"num_steps": state.schedule})
    if state.gradients is not None:
        optimizer.zero_grad()  # marks the buffers as in use
        _put(_list_gradients(model, optimizer), state.gradients)
    update.passes = state.passes


def reset_optimizer(policy: Policy) -> None:
    """Set the optimizer's states and steps to those of a new model; the weights stay."""
    optimizer = policy.role.optimizer
    optimizer.restore()
    _put_moments(optimizer, [{} for _ in _list_params(optimizer)])
    optimizer.resume(0, {"num_steps": 0})


@torch.no_grad()
def _put_moments(optimizer: Optimizer, moments: list[dict[str, torch.Tensor]]) -> None:
    for (adam, param), saved in zip(_list_params(optimizer), moments, strict=True):
        held = adam.state[param]
        for name in held.keys() | saved.keys():
            if name not in held:
                held[name] = saved[name].to(local_values(param).device, copy=True)
            elif name in saved:
                held[name].copy_(saved[name])
            else:
                held[name].zero_()  # as before the first step


def start_adapters(policy: Policy, lora: Lora) -> None:
    """Initialize the adapters as for a new model; the optimizer's masters follow."""

    def draw(name: str, size: tuple[int, ...]) -> torch.Tensor | None:
        *_, module, half, _ = name.split(".")
        is_drawn = half == "lora_A" and module in lora.modules
        return draw_initial(lora.seed, name, (lora.rank, size[1])) if is_drawn else None

    _fill_adapters(policy.model, draw)
    policy.role.optimizer.megatron.reload_model_params()


def read_export(policy: Policy, directory: str) -> None:
    """Load the weights, or the adapters, of an export; the optimizer's masters follow."""
    model = policy.model
    if not Path(directory).is_dir():
        raise refuse(f"{directory} does not exist", "path", "a checkpoint's directory", "it was deleted: save again")
    if model.adapters is None:
        params: Any = model.params  # plain tensors: NF4 weights are not trained
        load_weights(Path(directory), model.shape, model.placements(model.rank), params)
    else:
        with safe_open(Path(directory) / WEIGHTS_FILE, framework="pt") as file:
            held = {*file.keys()}
            _fill_adapters(model, lambda name, size: file.get_tensor(PREFIX + name) if PREFIX + name in held else None)
    policy.role.optimizer.megatron.reload_model_params()


@torch.no_grad()
def _fill_adapters(model: PackedModel, read: Callable[[str, tuple[int, ...]], torch.Tensor | None]) -> None:
    """Write the tensors that `read(name, size)` returns, which may be smaller, and zeros elsewhere."""
    adapters: Any = model.trained
    sizes = adapters.shape.logical_tensors()
    for p in adapters.placements(model.rank):
        whole, found = torch.zeros(sizes[p.hf_name]), read(p.hf_name, sizes[p.hf_name])
        if found is not None:
            whole[tuple(map(slice, found.shape))] = found
        adapters.params[p.param][box_slices(p.local_box)].copy_(whole[box_slices(p.hf_box)])
