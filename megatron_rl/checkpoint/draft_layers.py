# SPDX-License-Identifier: Apache-2.0
"""Layers behind the last, which predict further tokens (multi-token prediction of DeepSeek-V3 and GLM-4.5).

Engines draft with them. Unless `actor.mtp_lr` trains one, conversions and exports keep them as they are in the
checkpoint that the run began with; a checkpoint of training does not hold them then, and a model that is made of one
says that it has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.safetensors_index import index_safetensors
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.model_config import MTP_KEYS

_KEYS = (*MTP_KEYS, "mtp_num_hidden_layers")


def find_drafts(directory: Path, shape: ModelShape) -> dict[str, Path]:
    """Tensor -> file of those in a model directory, which may have a config.json alone."""
    config = json.loads((directory / "config.json").read_bytes())
    may_have = shape.delta_net is not None or any(config.get(key) for key in _KEYS)  # Qwen3-Next's does not tell
    if not may_have or not any(directory.glob("*.safetensors")):
        return {}
    return {name: file for name, file in index_safetensors(directory).items() if shape.is_draft(name)}


def forget_drafts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of a model without them."""
    return {key: 0 if key in _KEYS else value for key, value in config.items()}
