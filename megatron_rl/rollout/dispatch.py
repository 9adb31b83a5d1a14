# SPDX-License-Identifier: Apache-2.0
"""Which engine generates which sample: static, the same on every rank, and without a say in what is sampled.

Lengths of the responses to one prompt are alike, so an engine with the whole group of a hard prompt works when the
others have finished. Spread over the engines, the long responses are everybody's; the price is that several engines
compute the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A prompt token costs about a sixteenth of a sampled one (8B parameters on one GPU: 40 us; 0.6 ms with 32 responses
# running), and spreading saves about a quarter of the time where lengths correlate by 0.5 (bench_dispatch.py).
_PREFILL_COST = 1 / 16
_SAVING = 1 / 4


def assign_engines(
    dispatch: str,
    prompt_tokens: Sequence[int],
    group_size: int,
    num_engines: int,
    max_tokens: int,
    loads: np.ndarray | None = None,
) -> np.ndarray:
    """The engine of each sample.

    Args:
        dispatch: "groups": all samples of a prompt on the same engine, in turn. "samples": equal numbers of
            samples, with a prompt's samples on as many engines as there are, and prompt tokens balanced. "auto": see
            `choose_dispatch`.
        prompt_tokens: per prompt.
        group_size: samples per prompt.
        num_engines: to choose from.
        max_tokens: longest response.
        loads: [num_engines] samples that each has to finish beside these; None: none.

    Returns:
        [prompts * group_size] int64, samples of a prompt one after another.
    """
    if dispatch == "auto":
        dispatch = choose_dispatch(prompt_tokens, group_size, num_engines, max_tokens)
    engines = np.empty((len(prompt_tokens), group_size), np.int64)
    samples = np.zeros(num_engines, np.int64) if loads is None else loads.copy()
    if dispatch == "groups":
        for prompt in range(len(prompt_tokens)):
            engines[prompt] = samples.argmin()
            samples[engines[prompt, 0]] += group_size
        return engines.reshape(-1)
    tokens = np.zeros(num_engines, np.int64)
    for prompt in np.argsort(-np.asarray(prompt_tokens), kind="stable"):  # the longest first, as they fit in worst
        order = np.lexsort((tokens, samples))  # the engine with the fewest samples, among those with the fewest tokens
        engines[prompt] = np.resize(order, group_size)
        counts = np.bincount(engines[prompt], minlength=num_engines)
        samples += counts
        tokens += counts * prompt_tokens[prompt]
    return engines.reshape(-1)


def choose_dispatch(prompt_tokens: Sequence[int], group_size: int, num_engines: int, max_tokens: int) -> str:
    """What "auto" is for these prompts: "groups" or "samples".

    "groups" with one engine, and where computing the prompts on more than one engine costs more than it saves:
    copies * prompt tokens / 16 > (responses at their longest) / 4, with copies = min(group_size, num_engines) - 1. With
    8 responses per prompt on 8 engines: where prompts are longer than 4.6 times the longest response.
    """
    copies = min(group_size, num_engines) - 1
    responses = len(prompt_tokens) * group_size * max_tokens
    costs_more = copies * sum(prompt_tokens) * _PREFILL_COST > responses * _SAVING
    return "groups" if num_engines == 1 or costs_more else "samples"
