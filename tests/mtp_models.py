# SPDX-License-Identifier: Apache-2.0
"""Tiny models with a layer behind their last that predicts the token after the next: on ranks, and in transformers.

transformers leaves such layers out: the one here is the last layer of a model that has one more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from role_setups import make_setup
from safetensors.torch import load_file, save_file

from actor_runs import ACTOR, Case, build_actor
from megatron_rl.config.schema import ActorConfig
from megatron_rl.parallel.groups import join_groups
from megatron_rl.training.roles.actor import Actor
from megatron_rl.training.roles.frozen import AbsentRole
from megatron_rl.training.roles.mtp import Mtp, list_inputs
from megatron_rl.training.setup import LaidOutModel
from tiny_models import save_tiny_model

LAYERS = 4  # of the model; its name is also the number of the layer behind them
PREFIX = f"model.layers.{LAYERS}."


@dataclass(frozen=True)
class MtpReference:
    """The model in transformers with one more layer and the modules around that layer, by name."""

    model: Any
    beside: dict[str, torch.Tensor]

    @torch.no_grad()
    def compute_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [b, s, v] of the model, without the layer, at each token of sequences [b, s]."""
        layers = self.model.model.layers
        self.model.model.layers = layers[:LAYERS]
        logits = self.model(ids, use_cache=False).logits
        self.model.model.layers = layers
        return logits

    def score(self, ids: torch.Tensor, as_served: bool = False) -> torch.Tensor:
        """Log-probs [s - 2] of a sequence's tokens 2, 3, ... by the layer; gradients reach the layer alone.

        Args:
            as_served: leave out the second token's embedding, as vLLM does.
        """
        model, beside = self.model, self.beside
        layers = model.model.layers
        with torch.no_grad():
            model.model.layers = layers[:LAYERS]
            hidden = model.model(ids[None], use_cache=False).last_hidden_state
            model.model.layers = layers
            embedded = model.model.embed_tokens(ids[None].roll(-1))
            if as_served:
                embedded[:, 0] = 0
            positions = torch.arange(len(ids))[None]
            angles = model.model.rotary_emb(hidden, positions)
        parts = (embedded, beside["enorm.weight"]), (hidden, beside["hnorm.weight"])
        joined = torch.cat([self._norm(x, weight) for x, weight in parts], -1) @ beside["eh_proj.weight"].T
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        output = layers[LAYERS](joined, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        output = output[0] if isinstance(output, tuple) else output
        logits = self._norm(output, beside["shared_head.norm.weight"])[0, :-2] @ model.lm_head.weight.detach().T
        return logits.log_softmax(-1).gather(1, ids[2:, None])[:, 0]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.model.config.rms_norm_eps)

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for param in (*self.model.parameters(), *self.beside.values()):
            param.grad = None

    def find_gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients by transformers' parameter names; around the extra layer, by checkpoint names."""
        grads = {PREFIX + name: x.grad for name, x in self.beside.items()}
        grads |= {n: p.grad for n, p in self.model.named_parameters() if n.startswith(PREFIX)}
        return {name: grad for name, grad in grads.items() if grad is not None}


def save_model_with_mtp(directory: Path, family: str, **changes: Any) -> MtpReference:
    """Write a random model of four layers with the layer behind them, in HF format; see `save_tiny_model`."""
    model = save_tiny_model(directory, family, num_hidden_layers=LAYERS + 1, **changes)
    size = model.config.hidden_size
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        noise = torch.randn(*shape, generator=generator)
        return (0.1 * noise + 1 if len(shape) == 1 else 0.1 * noise).requires_grad_()

    norms = {name: draw(size) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    beside = {"eh_proj.weight": draw(size, 2 * size)} | norms
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file) | {PREFIX + name: x.detach().clone() for name, x in beside.items()}
    tensors |= {
        f"{PREFIX}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{PREFIX}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][:LAYERS]
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return MtpReference(model, beside)


def build_with_mtp(case: Case, path: Path, as_drafted: bool = False) -> Actor:
    """An actor and the layer behind its last, each on its ranks; collective."""
    actor = build_actor(case, path)
    config, shape, groups = ActorConfig(**(ACTOR | case.actor)), actor.model.shape.mtp, actor.model.groups
    layout = groups.layout.last_stage
    own = groups if layout == groups.layout else join_groups(layout)
    options: dict[str, Any] = dict(spec=dict(name="mtp"), shape=shape, total_optimizer_steps=10)
    setup = make_setup("actor", path, config, own or groups, dtype=case.dtype, **options)
    mtp = Mtp(setup) if own else AbsentRole(LaidOutModel(setup.spec, shape, layout))
    actor.attach_mtp(mtp, partial(list_inputs, as_drafted=as_drafted))
    return actor


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model in HF format."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
