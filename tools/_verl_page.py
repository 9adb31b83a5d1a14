# SPDX-License-Identifier: Apache-2.0
"""The page `docs/verl_keys.md`: every verl name that is translated, ignored or refused."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.compat import sft_names, trl
from megatron_rl.compat.kinds import Ignored, Only, Renamed, SameAs
from megatron_rl.compat.name_groups import GROUPS
from megatron_rl.compat.name_tables import ALIASES, PATTERNS
from megatron_rl.compat.verl_defaults import DEFAULTS, DEPENDENT, OF_FSDP
from megatron_rl.config.fields import list_fields, render

_INTRODUCTION = """\
# verl's names

Recipes and command-line overrides written for verl work unchanged:

    python launch/pretrain_grpo.py verl_recipe.yaml --dry-run          # what it means here, and the batch arithmetic
    torchrun --nproc-per-node 8 launch/pretrain_grpo.py verl_recipe.yaml actor_rollout_ref.rollout.n=16

Every name is understood, ignored with a notice, or refused with the reason; an unknown name is an error.
`${section.key}`, `${.key}` and `${oc.select:section.key,default}` are resolved, also nested, `~/` is your home, and
`null` and `???` mean "not given". `--config-path DIR --config-name NAME` reads a file of yours, and its list `defaults`
the files beside it; of verl's own files the names are enough.
Keys that this program spells alike (`data.train_batch_size`, `trainer.total_epochs`) are its own.
A dry run without `--world-size` plans for `trainer.nnodes` x `trainer.n_gpus_per_node` ranks.

`python tools/make_docs.py` makes this page from the tables of names. TRL's names are in [Migrating](migrating.md#trl).
"""
_DEFAULTS = """
## Defaults

A recipe, or a command without one, is verl's if it has names of `actor_rollout_ref` or `model_engine`, no section that
only this program has (`actor`, `schedule`, ...), and names the policy by verl's name or the GPUs by
`trainer.n_gpus_per_node` (default: 8). It gets these defaults of verl's where this program has others; the note
`assumed:` says which have an effect. Files and names of a run (`data.val_files`, `critic.model.path`,
`trainer.default_local_dir`) and `rollout.enforce_eager` keep this program's defaults.

| verl | default | |
|---|---|---|
"""
_TRL = """
### Of TRL and ms-swift

| name | why |
|---|---|
"""
_SFT = """
## Fine-tuning

Names of verl's SFT trainer, for `launch/pretrain_sft.py`; `optim.*`, `engine.*` and `model.*` are the actor's besides.
A recipe has them if it has `optim.*`, `engine.*`, `data.messages_key` or `model.partial_pretrain`.

| verl | here |
|---|---|
"""
_SFT_DEFAULTS = """
| verl | default | with |
|---|---|---|
"""
_UNDERSTOOD = """
## Understood

| verl | here | values |
|---|---|---|
"""
_TOGETHER = """
## Understood together

Names in one row are read together, because their meanings depend on each other.

| verl | here |
|---|---|
"""
_ONLY = """
## Accepted only with the values that match what this program does

`null` is always accepted.

| verl | accepted | why others are refused |
|---|---|---|
"""
_IGNORED = """
## Ignored, with a notice

None of these changes the results.

| verl | why |
|---|---|
"""


def format_page() -> str:
    """Format the page."""
    own = list_fields()
    understood, accepted, ignored = [], [], []
    for name, alias in sorted(ALIASES.items()):
        if isinstance(alias, Renamed):
            understood.append((f"`{name}`", f"`{alias.target}`", _describe_values(alias)))
        elif isinstance(alias, SameAs):
            accepted.append((f"`{name}`", f"the value of `{alias.target}`", "both mean the same here"))
        elif isinstance(alias, Only):
            values = ", ".join(f"`{render(value)}`" for value in alias.allowed) or "`null`"
            accepted.append((f"`{name}`", values, alias.reason.replace("|", "\\|")))
        else:
            assert isinstance(alias, Ignored)
            ignored.append((f"`{name}`", alias.reason))
    ignored += [(f"`{name}`", alias.reason) for name, alias in PATTERNS.items() if isinstance(alias, Ignored)]
    of_trl = [(f"`{name}`", alias.reason) for name, alias in sorted(trl.ALIASES.items()) if isinstance(alias, Ignored)]
    accepted += [(f"`{name}`", "`null`", alias.reason) for name, alias in PATTERNS.items() if isinstance(alias, Only)]
    defaults = [(f"`{name}`", f"`{render(value)}`", "") for name, value in DEFAULTS.items()]
    defaults += [(f"`{name}`", f"`{render(value)}`", "but with Megatron") for name, value in OF_FSDP.items()]
    defaults += [(f"`{name}`", f"`{render(value)}`", f"with `{other}`") for name, value, other in DEPENDENT]
    together = [(", ".join(f"`{name}`" for name in group.names), group.meaning) for group in GROUPS]
    shared = [name for name in sorted(own) if name in ALIASES]
    note = f"\nOf these, {', '.join(f'`{name}`' for name in shared)} are also names of this program's own.\n"
    return (
        _INTRODUCTION
        + _DEFAULTS
        + _rows(defaults)
        + _UNDERSTOOD
        + _rows(understood)
        + note
        + _TOGETHER
        + _rows(together)
        + _ONLY
        + _rows(accepted)
        + _IGNORED
        + _rows(ignored)
        + _TRL
        + _rows(of_trl)
        + _SFT
        + _rows(_list_sft_names())
        + _SFT_DEFAULTS
        + _rows(_list_sft_defaults())
    )


def _list_sft_names() -> Iterable[tuple[str, str]]:
    for name, alias in sft_names.ALIASES.items():
        if name.startswith(("optim.", "engine.", "model.")) and not name.startswith("model.partial"):
            continue
        if isinstance(alias, Renamed):
            yield f"`{name}`", f"`{alias.target}`"
        elif isinstance(alias, Only):
            yield f"`{name}`", f"{', '.join(f'`{render(value)}`' for value in alias.allowed)} only: {alias.reason}"
        elif isinstance(alias, Ignored):
            yield f"`{name}`", f"ignored: {alias.reason}"
    for group in sft_names.GROUPS:
        yield ", ".join(f"`{name}`" for name in group.names), group.meaning


def _list_sft_defaults() -> Iterable[tuple[str, str, str]]:
    for name, value in sft_names.DEFAULTS.items():
        yield f"`{name}`", f"`{render(value)}`", ""
    for optimizer, changes in sft_names.OF_OPTIMIZER.items():
        for name, value in changes.items():
            yield f"`{name}`", f"`{render(value)}`", f"`optim={optimizer}`" if optimizer else "`model.partial_pretrain`"


def _describe_values(alias: Renamed) -> str:
    pairs = [
        f"`{render(theirs)}`"
        if theirs == ours and isinstance(theirs, bool) == isinstance(ours, bool)
        else f"`{render(theirs)}` is `{render(ours)}`"
        for theirs, ours in alias.values
    ]
    return ", ".join(pairs) + ("; others are refused" if alias.closed else "")


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
