# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: the rooms by layer, and the two roads through them."""

from __future__ import annotations

from tools._rooms import ROOMS

_HEAD = """<!-- Made by tools/make_docs.py from tools/_rooms.py; do not edit. -->
# Architecture

One program, run by every rank, trains a policy. Two things travel through it: samples and weights. The code lies in
rooms, the sub-packages of `megatron_rl/`.

## Rooms

A room imports rooms of lower layers only, and rooms of one layer do not know each other; `types` is the vocabulary of
all. `tests/test_house.py` enforces it from the table that this page is made from.

| layer | room | what it does |
|---|---|---|
"""
# Each line names rooms of the table above; a test holds the page to that.
_ROADS = """
## The road of the samples

```text
 data          prompts of step n, shuffled by (seed, epoch)
  |
 rollout       asks an engine (engines, through weight_sync) and scores what it answers (rewards)
  |
 experience    headers of the step on every rank; a role fetches its share of the tokens and packs it (packing)
  |
 training      old log-probs, reference log-probs, values: columns, which other roles fetch (roles)
  |
 algorithms    advantages and the loss, as sums over tokens with global denominators
  |
 training      optimizer steps of actor and critic
  |
 observability one record per step; checkpoint and capsule keep what a later run needs
```

## The road of the weights

```text
 checkpoint    HF files or a distributed checkpoint, in boxes of logical tensors (weights)
  |
 models        Megatron shards, in the layout of the role (parallel)
  |
 training      optimizer steps
  |
 weight_sync   the switch of modes: planned once and executed by resharding, with a certificate over every tensor
  |
 engines       the engine's own parameters, sharing the actor's storage where the layouts agree
  |
 checkpoint    back to the disk, for any other layout
```

The loop that joins both is `Trainer.train` in `megatron_rl/trainer/grpo.py`; pictures are in [Concepts](concepts.md),
and what a newcomer adds to which room is in [Extending](extending.md).
"""


def format_page() -> str:
    """The page, the highest layer first."""
    rows = sorted(ROOMS.items(), key=lambda item: -item[1].layer)
    table = [f"| {room.layer} | `{name}` | {room.does} |" for name, room in rows]
    return _HEAD + "\n".join(table) + "\n" + _ROADS
