# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: the rooms by layer, and the two roads through them."""

from __future__ import annotations

from tools._rooms import ROOMS

_HEAD = """<!-- Made by tools/make_docs.py from tools/_rooms.py; do not edit. -->
# Architecture

One program, run by every rank, trains a policy. Two things travel through it: samples and weights. The code is divided
into rooms, the subpackages of `megatron_rl/`.

## Rooms

A room imports only rooms of lower layers. Rooms of the same layer do not import each other; every room may import
`types`. `tests/test_house.py` enforces this from the table that generates this page.

| layer | room | what it does |
|---|---|---|
"""
# Each line names rooms of the table above; a test holds the page to that.
_ROADS = """
## The road of the samples

```text
 data          prompts of step n, shuffled by (seed, epoch)
  |
 rollout       generates with an engine (engines, through weight_sync) and scores the responses (rewards)
  |
 experience    headers of the step on every rank; each role fetches its share of the tokens and packs it (packing)
  |
 training      old log-probs, reference log-probs and values: columns that other roles fetch (roles)
  |
 algorithms    advantages and the loss, as sums over tokens with global denominators
  |
 training      optimizer steps of actor and critic
  |
 observability one record per step; checkpoint and capsule store what a later run needs
```

## The road of the weights

```text
 checkpoint    HF files or a distributed checkpoint, as boxes of logical tensors (weights)
  |
 models        Megatron shards in the role's layout (parallel)
  |
 training      optimizer steps
  |
 weight_sync   switches between training and rollout: resharding plans once, moves the weights and certifies them
  |
 engines       the engine's own parameters, sharing the actor's storage where the layouts agree
  |
 checkpoint    back to disk, for any other layout
```

`Trainer.train` in `megatron_rl/trainer/grpo.py` joins both roads. [Concepts](concepts.md) has pictures, and
[Extending](extending.md) says what to add to which room.
"""


def format_page() -> str:
    """The page, the highest layer first."""
    rows = sorted(ROOMS.items(), key=lambda item: -item[1].layer)
    table = [f"| {room.layer} | `{name}` | {room.does} |" for name, room in rows]
    return _HEAD + "\n".join(table) + "\n" + _ROADS
