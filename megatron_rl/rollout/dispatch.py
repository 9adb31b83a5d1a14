# SPDX-License-Identifier: Apache-2.0
"""Static assignment of samples to rollout engines; equal on every rank, and without effect on the samples.

Response lengths of one prompt are correlated: an engine with the whole group of a hard prompt finishes last. Spreading
balances long responses at the price of several prefills of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A prompt token costs about a sixteenth of a sampled one (8B parameters on one GPU: 40 us; 0.6 ms with 32 running
# responses), and spreading saves about a quarter of the time if lengths correlate by 0.5 (bench_dispatch.py).
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
    """Assign an engine to each sample.

    Args:
        dispatch: "groups" assigns all samples of a prompt to the least loaded engine; "samples" spreads them, balancing
            numbers of samples and prompt tokens; for "auto" see `choose_dispatch`.
        loads: [num_engines] unfinished samples; `None` means zero.

    Returns:
        [prompts * group_size] int64, grouped by prompt.
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
    for prompt in np.argsort(-np.asarray(prompt_tokens), kind="stable"):  # longest first, for balance
        order = np.lexsort((tokens, samples))  # by samples, then tokens
        engines[prompt] = np.resize(order, group_size)
        counts = np.bincount(engines[prompt], minlength=num_engines)
        samples += counts
        tokens += counts * prompt_tokens[prompt]
    return engines.reshape(-1)


def choose_dispatch(prompt_tokens: Sequence[int], group_size: int, num_engines: int, max_tokens: int) -> str:
    """Return "groups" or "samples", the choice of "auto" for these prompts.

    "groups" is chosen if additional prefills cost more than spreading saves: copies * prompt tokens / 16 > (responses *
    max_tokens) / 4, with copies = min(group_size, num_engines) - 1. With 8 responses per prompt on 8 engines: for
    prompts longer than 4.6 times the longest response.
    """
    copies = min(group_size, num_engines) - 1
    responses = len(prompt_tokens) * group_size * max_tokens
    costs_more = copies * sum(prompt_tokens) * _PREFILL_COST > responses * _SAVING
    return "groups" if num_engines == 1 or costs_more else "samples"
