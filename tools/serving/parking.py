# SPDX-License-Identifier: Apache-2.0
"""Copies of a policy's state on the host, so that several models take turns in one policy.

A state is everything that training changes on this rank: trained weights, float32 masters, the optimizer's moments, the
numbers of steps, and gradients that no step has used. It is exchanged in place, as captured steps hold addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.models.stages import local_values
from megatron_rl.run.primitives import Policy
from megatron_rl.training.optimizer import Optimizer
from megatron_rl.training.packed_model import PackedModel

Weights = list[torch.Tensor]


def _list_weights(model: PackedModel) -> Weights:
    """List the adapters, or all parameters: router biases change without a gradient."""
    return [local_values(p) for p in model.stages.parameters() if p.requires_grad or model.adapters is None]


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
