# SPDX-License-Identifier: Apache-2.0
"""The text part of image-text models (published Qwen3.5): its config and tensor names.

Files name its tensors `model.language_model.*`, others `model.visual.*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.weights.family import FAMILIES

# `model_type` of an image-text model -> family of its text part.
TEXT_PARTS = {family.image_text: name for name, family in FAMILIES.items() if family.image_text is not None}
_OUTER = ("tie_word_embeddings", "quantization_config")  # keys that config.json has outside the text section


def take_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text section of config.json, or the whole config of a text-only model."""
    name, text = TEXT_PARTS.get(str(config.get("model_type"))), config.get("text_config")
    if name is None or not isinstance(text, dict):
        return dict(config)
    classes = [
        FAMILIES[name].architecture if architecture.endswith("ForConditionalGeneration") else architecture
        for architecture in config.get("architectures") or ()
    ]
    outer = {key: config[key] for key in _OUTER if key in config}
    return {"model_type": name} | text | outer | {"architectures": classes}


def name_text_tensor(stored: str) -> str | None:
    """Return a tensor's name in the text-only model, or `None`."""
    if stored.startswith("model.visual."):
        return None
    inner = stored.removeprefix("model.language_model.")
    return stored if inner == stored else f"model.{inner}"
