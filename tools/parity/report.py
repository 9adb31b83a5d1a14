# SPDX-License-Identifier: Apache-2.0
"""Verdict of a comparison: gaps, first divergence, causes (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_rl.weights.families import ModelShape
from tools.parity.weights import WrongTensor

# Limits of the relative gap (Frobenius norm) of a traced tensor, and of the absolute gap of a log-prob: about a hundred
# times the rounding error of equal models with 30 layers.
TRACE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}


@dataclasses.dataclass(frozen=True)
class Gap:
    """The distance of two tensors."""

    tensor: str
    relative_gap: float
    max_abs_gap: float


def measure_gaps(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[Gap]:
    """Measure gaps of common tensors, in order."""
    gaps = []
    for name in first:
        if name in second:
            gap = first[name] - second[name]
            relative = (gap.norm() / first[name].norm().clamp_min(1e-30)).item()
            gaps.append(Gap(name, relative, gap.abs().max().item()))
    return gaps


def measure_logprobs(scores: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, dict[str, float]]:
    """Measure the log-prob gap of every pair of models.

    Args:
        scores: model -> [tokens] per sequence, for the same tokens.

    Returns:
        "hf-megatron" -> max, mean and number of tokens.
    """
    found, models = {}, list(scores)
    for index, first in enumerate(models):
        for second in models[index + 1 :]:
            gap = (torch.cat(list(scores[first])) - torch.cat(list(scores[second]))).abs()
            found[f"{first}-{second}"] = {"max": gap.max().item(), "mean": gap.mean().item(), "tokens": gap.numel()}
    return found


def explain(
    reference: ModelShape, other: ModelShape, wrong: Mapping[str, Sequence[WrongTensor]], divergence: Gap | None
) -> list[str]:
    """List the likely causes of differences as sentences, most certain first."""
    causes = []
    for item in dataclasses.fields(ModelShape):
        values = getattr(reference, item.name), getattr(other, item.name)
        if values[0] != values[1]:
            causes.append(f"{item.name} is {values[1]!r} in the checkpoint's config.json, {values[0]!r} in the model's")
    for model, tensors in wrong.items():
        for tensor in tensors[:4]:
            causes.append(f"{model}: {tensor.name} {tensor.what} (largest difference {tensor.max_abs_gap:.3g})")
        if len(tensors) > 4:
            causes.append(f"{model}: and {len(tensors) - 4} more tensors differ")
    if divergence is not None:
        causes.append(f"{divergence.tensor} is the first result that differs" + _hint(divergence.tensor))
    return causes


def _hint(tensor: str) -> str:
    """Suggest, as the end of a sentence, why `tensor` is the first wrong result, although its inputs are equal."""
    if "(heads)" in tensor:
        return ": rotary positions, order of the heads, or the mask, as its inputs agree"
    if tensor == "lm_head":
        return ": the output layer (or its tie to the embedding), as its input agrees"
    return ", as its inputs agree: see its weight and bias"


def make_report(
    *,
    settings: dict[str, Any],
    scores: Mapping[str, Sequence[torch.Tensor]],
    gaps: Sequence[Gap],
    wrong: Mapping[str, Sequence[WrongTensor]],
    reference: ModelShape,
    other: ModelShape,
    dtype: str,
) -> dict[str, Any]:
    """Return JSON (see docs/conversion.md)."""
    logprobs = measure_logprobs(scores)
    # First gap beyond rounding.
    divergence = next((gap for gap in gaps if not gap.relative_gap <= TRACE_TOLERANCE[dtype]), None)
    causes = explain(reference, other, wrong, divergence)
    too_far = [pair for pair, gap in logprobs.items() if not gap["max"] <= LOGPROB_TOLERANCE[dtype]]
    if too_far and not causes:
        causes.append(f"log-probs of {', '.join(too_far)} differ, though weights and layers agree")
    return {
        "verdict": "different" if causes or too_far else "equal",
        "causes": causes,
        "max_abs_logprob_gap": {pair: gap["max"] for pair, gap in logprobs.items()},
        "logprob_gaps": logprobs,
        "logprobs": {model: [x.tolist() for x in sequences] for model, sequences in scores.items()},
        "first_divergence": dataclasses.asdict(divergence) if divergence else None,
        "tolerance": {"trace": TRACE_TOLERANCE[dtype], "logprob": LOGPROB_TOLERANCE[dtype]},
        "wrong_weights": {model: [dataclasses.asdict(t) for t in tensors] for model, tensors in wrong.items()},
        "trace": [dataclasses.asdict(gap) for gap in gaps],
        "settings": settings,
    }


def format_report(report: Mapping[str, Any]) -> str:
    """Format the report as a table."""
    lines = [f"{'log-probs':24}{'max gap':>12}{'mean gap':>12}{'tokens':>9}"]
    for pair, gap in report["logprob_gaps"].items():
        lines.append(f"{pair:24}{gap['max']:>12.3g}{gap['mean']:>12.3g}{gap['tokens']:>9.0f}")
    trace, first = report["trace"], report["first_divergence"]
    if trace:
        lines += ["", f"{'hf-megatron, result of':44}{'relative gap':>14}{'largest':>12}"]
        at = next((i for i, gap in enumerate(trace) if first and gap["tensor"] == first["tensor"]), None)
        shown = range(max(0, at - 2), min(len(trace), at + 3)) if at is not None else range(-3, 0)
        for index in shown:
            gap = trace[index]
            mark = "  <- first to differ" if index == at else ""
            lines.append(f"{gap['tensor']:44}{gap['relative_gap']:>14.3g}{gap['max_abs_gap']:>12.3g}{mark}")
    lines += ["", f"verdict: {report['verdict']}", *(f"  {cause}" for cause in report["causes"])]
    return "\n".join(lines)
