# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: the rooms by layer, and the two roads through them."""

from __future__ import annotations

from tools._rooms import ROOMS

_HEAD = """<!-- Made by tools/make_docs.py from tools/_rooms.py; do not edit. -->
# Architecture

The code is divided into rooms, the subpackages of `megatron_rl/`. A room imports only rooms of lower layers and
`types`; `tests/test_house.py` enforces this from the table that generates this page.

## Rooms

| layer | room | what it does |
|---|---|---|
"""
# Each line names rooms of the table above; a test holds the page to that.
_ROADS = """
## The road of the samples

```text
 data          prompts of step n, shuffled by (seed, epoch)
  |
 rollout       responses from engines, scored by rewards
  |
 experience    headers on every rank; each role fetches its tokens and packs them (packing)
  |
 training      columns: old log-probs, reference log-probs, values (roles)
  |
 algorithms    advantages and losses, with global denominators
  |
 training      optimizer steps of actor and critic
  |
 observability one record per step
```

## The road of the weights

```text
 checkpoint    HF files or a distributed checkpoint, as boxes of logical tensors (weights)
  |
 models        Megatron shards in the role's layout (parallel)
  |
 training      optimizer steps
  |
 weight_sync   moves the weights by a plan of resharding and certifies them
  |
 engines       the engine's own parameters
  |
 checkpoint    back to disk, for any layout
```

`Trainer.train` in `megatron_rl/trainer/grpo.py` joins both roads. [Concepts](concepts.md) has pictures;
[Extending](extending.md#inside-the-package) says where changes go.
"""


def format_page() -> str:
    """The page, the highest layer first."""
    rows = sorted(ROOMS.items(), key=lambda item: -item[1].layer)
    table = [f"| {room.layer} | `{name}` | {room.does} |" for name, room in rows]
    return _HEAD + "\n".join(table) + "\n" + _ROADS
