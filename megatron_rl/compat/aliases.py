# SPDX-License-Identifier: Apache-2.0
"""Translates verl and TRL setting names, and formats all names for `--help`.

verl's tables are in `name_tables.py` (single names) and `name_groups.py` (names read together), TRL's in `trl.py`.
Invariant: a setting without effect yields a note, and one that would change the result an error.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from megatron_rl.compat import name_groups, name_tables, sft_names, trl, verl_defaults
from megatron_rl.compat.kinds import (
    AliasGroup,
    Combined,
    Ignored,
    Only,
    Parts,
    Renamed,
    SameAs,
    each,
    look_up,
    move,
    note,
    put,
    read_boolean,
    same,
)
from megatron_rl.compat.name_tables import PATTERNS, refuse_stages
from megatron_rl.config.algorithm import KlCovOptions
from megatron_rl.config.checked import Mistakes
from megatron_rl.config.fields import WIDTH, FieldInfo, coerce, list_fields, list_options, render, section_classes
from megatron_rl.config.schema import ACTOR_DECIDES, REWARD_RULES, RewardConfig
from megatron_rl.config.sections import CheckpointConfig, ObservabilityConfig
from megatron_rl.config.sources import COMMAND_LINE, Setting, describe
from megatron_rl.config.suggestions import unknown_key_error
from megatron_rl.types import UserError

_SYNTAX = """\
Settings are given in the recipe (nested sections) and on the command line, which wins:
  section.key=value               actor.lr=1e-6   data.train_files=[a.jsonl,b.jsonl]
  --section.key value             --actor.sequence_parallel   (a flag without a value means true)
  --leaf value, as in Megatron    --lr 1e-6   (a leaf of several sections needs its section)
  verl's names                    actor_rollout_ref.rollout.n=8   (list below)
  TRL's names                     num_generations=8   (docs/migrating.md)
"""
_NAMED = 12  # settings without effect that a note names
# Hydra's mark for a mandatory value, and an empty section left by a reference.
_NOTHING = ("???", {})
_GONE = "the setting is gone, and what its default said is always done"
_SHARDED = "set zero_stage=0 of the role for states that are not sharded"
# Removed settings, which config.yaml files of earlier runs contain.
_EARLIER = {
    **each("actor.max_num_seqs critic.max_num_seqs", Only((64,), _GONE)),
    **each("actor.use_distributed_optimizer critic.use_distributed_optimizer", Only((True,), _SHARDED)),
    **{
        f"{role}.{leaf}": SameAs(f"actor.{leaf}", strict=True)
        for role in ("critic", "teachers.*")
        for leaf in ACTOR_DECIDES
    },
    **{name: alias for role in ("critic", "reward_model", "teachers.*") for name, alias in refuse_stages(role).items()},
    "agents.episode_timeout_seconds": Ignored("agents.turn_timeout_seconds bounds each answer"),
    **each(
        "actor.lora.rslora critic.lora.rslora", Only((False,), "multiply lora.alpha by sqrt(lora.rank), the same scale")
    ),
    **each("agents.max_failed_share reward.max_failed_share", Only((0.5,), "set trainer.max_failed_share instead")),
    "agents.workers": Ignored("an engine's episodes are forked from one process"),
    **each("critic.offload_gradients critic.overlap_grad_reduce", Ignored("the actor's setting decides for both")),
    "critic.enable": Ignored("algorithm.adv_estimator decides: there is a critic if it needs values"),
    "critic.quantization": Only(("none",), "only the policy learns adapters of a model in four bits"),
    **{
        f"algorithm.{earlier}": Renamed(f"algorithm.options.{option}")
        for earlier, option in (
            *(("sapo_tau_pos", "sapo.tau_pos"), ("sapo_tau_neg", "sapo.tau_neg"), ("kl_cov_coef", "kl_cov.coef")),
            *(("clip_cov_low", "clip_cov.low"), ("clip_cov_high", "clip_cov.high")),
        )
    },
    "observability.console_every": Ignored("the console has a line for each step"),
    "observability.progress_bar": Ignored("bars are drawn on a terminal only"),
    **each(
        "checkpoint.keep_best hybrid.alias_weights observability.status_token trainer.log_validation",
        Only((True,), _GONE),
    ),
    "checkpoint.max_failed_saves": Only((3,), _GONE),
    "data.pass_rates": Only((), "train on the prompts that tools/evaluate.py --rollouts DIR --choose LOW HIGH writes"),
    "data.pass_rate_range": Ignored("tools/evaluate.py --choose takes it"),
    "data.validation_batch_size": Only((), _GONE),
    "reference.max_tokens_per_microbatch": Ignored("its passes take the actor's budget, with the same log-probs"),
    "reward.service_backoff_seconds": Only((0.5,), _GONE),
    "reward.service_fallback_reward": Only((0.0,), "nothing is learned from such a response, and 0 is logged"),
    "reward.service_url": Only((), "give the URL as reward.function, or in reward.components"),
    "reward.service_max_answer_bytes": Only((64 << 20,), _GONE),
    "reward_model.logprob_chunk_tokens": Only((None, 512), "a reward model has no log-probs of tokens"),
    "reward_model.share_prompts": Only((True,), _GONE),
    "reward_model.recompute_granularity": Only(("none",), _GONE),
    "trainer.breakpoint_step": Only((), "set a breakpoint in the IDE that --debug-rank waits for"),
    "trainer.debug_rank": Only((), "give the flag --debug-rank R"),
    "observability.explain": Only((False,), "give the flag --explain"),
    "rollout.server.restarts": Only((3,), _GONE),
    "rollout.server.start_seconds": Only((600.0,), "rollout.silent_seconds bounds the start as well"),
}
_TRACKERS: dict[str, tuple[tuple[Any, list[str]], ...]] = {
    "observability.tensorboard": ((True, ["tensorboard"]), (False, [])),
    "observability.wandb": (("off", []), (False, []), ("offline", ["wandb-offline"]), ("online", ["wandb"])),
    "observability.traces": (("off", []), (False, []), ("otlp", ["otlp"])),
}
_MERGED = {"data.response_key": "data.answer_key", "reward.service_timeout_seconds": "reward.timeout_seconds"}


def _merge(earlier: str, target: str) -> AliasGroup:
    """Build the translation of a setting of earlier versions, in whose files `target` was another setting."""

    def combine(parts: Parts) -> Combined:
        given, other = parts[earlier], parts.get(target)
        if given.value is None:
            return
        if other is not None and other.layer == given.layer and not same(other.value, given.value):
            raise UserError(
                f"{earlier} = {given.value!r}, and {target} = {other.value!r}",
                source=f"{given.source} and {other.source}",
                expected=f"one value: both are {target} now",
                hint=f"remove {earlier}, or give {target} on the command line",
            )
        yield replace(given, name=target)

    return AliasGroup((earlier,), target, combine, reads=(target,), targets={earlier: target})


_ANSWERS = (("marked", "marked"), ("any", "any"))
# Settings of a reward in this and earlier versions, of the run and of a source of prompts.
_REWARD = re.compile(r"((?:data\.sources\.[^.]+\.)?reward)\.(rule|answer|function|components)")


def _drop_nulls(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings without `reward.function` null, and without the functions, not rules, that it takes back."""
    kept = list[Setting]()
    for one in settings:
        if one.value is not None or not one.name.endswith("reward.function"):
            kept.append(one)
            continue
        files = name_groups.REWARD_FILES if one.name == "reward.function" else ()
        kept = [
            other
            for other in kept
            if other.value in REWARD_RULES
            or not (other.name == one.name or (other.name in files and other.layer < one.layer))
        ]
    return kept


def _join_rewards(settings: Sequence[Setting], mistakes: Mistakes) -> tuple[list[Setting], list[str]]:
    """Translate `reward.rule` and `reward.answer` of the run and of sources; return all settings, and notes.

    A rule counts where no function is named, and an answer for the rule math, alone or in components.
    """
    found, notes, places = list[Setting](), list[str](), {"reward": dict[str, list[Setting]]()}
    for one in settings:
        if (parts := _REWARD.fullmatch(one.name)) is None:
            found.append(one)
        elif one.value is not None or one.name == "reward.components":
            with mistakes.collect("reward.function"):
                if parts[2] == "answer":
                    look_up(one, "reward.function", _ANSWERS, "set reward.function=math or reward.function=math_any")
                places.setdefault(parts[1], {}).setdefault(parts[2], []).append(one)
    for place, given in places.items():
        rule, function = _strongest(given.get("rule", ())), _strongest(given.get("function", ()))
        if rule and (function is None or (function.value in REWARD_RULES and function.layer < rule.layer)):
            given["function"] = [replace(rule, name=f"{place}.function")]
        elif rule and not rule.weak and rule.value != RewardConfig.function:
            notes.append(note(rule, f"{place}.function decides"))
    idle = [one for given in places.values() for one in given.get("answer", ()) if one.value == "any"]
    run = places["reward"]
    for place, given in places.items():
        own = given if given.keys() & {"function", "components"} else run  # a source's own replace all of the run's
        settled = {leaf: given.get(leaf, []) for leaf in ("function", "components")}
        answer = _strongest(given.get("answer", ())) or _strongest(run.get("answer", ()))
        if answer and (own is given or "answer" in given):
            components = _strongest(own.get("components", ()))
            leaf = "components" if components and components.value else "function"
            before = own.get(leaf) or [put(answer, f"reward.{leaf}", RewardConfig.function)]
            settled[leaf] = [replace(_set_answer(one, answer), name=f"{place}.{leaf}") for one in before]
            if [one.value for one in settled[leaf]] != [one.value for one in before]:
                idle = [one for one in idle if one is not answer]
        found += [*settled["function"], *settled["components"]]
    return found, [*notes, *(note(answer, "it belongs to the rule math") for answer in idle)]


def _strongest(settings: Sequence[Setting]) -> Setting | None:
    return max(reversed(settings), key=lambda one: (one.layer, not one.weak), default=None)


def _set_answer(setting: Setting, answer: Setting) -> Setting:
    """Return a function or components with the rule of mathematics that `answer` is, unless it was given after it."""
    before, after = ("math", "math_any") if answer.value == "any" else ("math_any", "math")
    if answer.value == "marked" and answer.layer <= setting.layer:
        return setting
    texts = setting.value if isinstance(setting.value, list) else [setting.value]
    change = partial(re.sub, rf"^(\s*\S+\s+)?{before}(?!\S)", rf"\g<1>{after}")
    changed = [change(text) if isinstance(text, str) else text for text in texts]
    return replace(setting, value=changed if isinstance(setting.value, list) else changed[0])


def _add_tracker(part: Setting, trackers: Any) -> list[Any]:
    """Return the trackers with those that a setting of earlier versions says, and without others of its kind."""
    known = _TRACKERS[part.name]
    chosen = look_up(part, "observability.trackers", known, "set observability.trackers instead").value
    given = trackers if isinstance(trackers, list) else [trackers]
    return [one for one in given if all(one not in names for _, names in known)] + chosen


def _move_share(parts: Parts) -> Combined:
    """Translate `algorithm.cov_ratio`, which two losses had in common, into an option of the configured one."""
    given, loss = parts["algorithm.cov_ratio"], parts.get("algorithm.policy_loss")
    if loss is not None and loss.value in ("clip_cov", "kl_cov"):
        yield replace(given, name=f"algorithm.options.{loss.value}.ratio")
    elif given.value != KlCovOptions().ratio:
        yield note(given, "it belongs to algorithm.policy_loss clip_cov and kl_cov")


def _join_lengths(parts: Parts) -> Combined:
    """Translate `layout.lengths`, which had an effect in the mode auto alone."""
    lengths, mode = parts.get("layout.lengths"), parts.get("layout.mode")
    lengths = None if lengths is None or lengths.value is None else lengths
    if lengths and mode and mode.value == "auto":
        yield replace(max(mode, lengths, key=lambda one: one.layer), name=mode.name, value=f"auto {lengths.value}")
        return
    if mode:
        yield mode
    if lengths:
        yield note(lengths, "layout.mode is not 'auto'")


def _move_final(parts: Parts) -> Combined:
    """Translate `trainer.save_final`: without checkpoints of steps, false means none at all."""
    final, steps = parts["trainer.save_final"], parts.get("trainer.save_freq")
    if final.value is None or read_boolean(final):
        return
    if steps is not None and steps.value not in (None, 0, -1):
        yield note(final, f"with trainer.save_freq={steps.value} the last step is saved, too")
    elif steps is None or steps.layer <= final.layer:
        yield replace(final, name="trainer.save_freq", value=None, layer=COMMAND_LINE)  # above the 0 beside it


def _read_controller(kind: Setting, target: float | None) -> float | None:
    """Return the target of a controller that is fixed or adaptive."""
    kinds = (("fixed", None), ("adaptive", target or name_groups.KL_TARGET))
    return look_up(kind, "algorithm.kl_target", kinds, "set algorithm.kl_target alone").value


_SILENCES = {"rollout.server.silent_seconds": 600, "schedule.silent_seconds": 15}  # with their defaults


def _set_weight(part: Setting, pair: list[float]) -> list[float]:
    """Return the weights of KTO with one that was a setting of its own."""
    return [pair[0], part.value] if "undesirable" in part.name else [part.value, pair[1]]


def _set_silence(part: Setting, seconds: float | None) -> float | None:
    """Return the limit of an earlier setting, or `seconds` if it had its default."""
    return seconds if part.value == _SILENCES[part.name] else part.value


def _add_host(part: Setting, port: Any) -> Any:
    """Return the address of the status page, if there is one."""
    return None if port is None else f"{part.value}:{str(port).rpartition(':')[2]}"


def _set_contents(part: Setting, contents: list[str]) -> list[str]:
    """Return the contents of a checkpoint with or without the one that a switch of earlier versions names."""
    kind = part.name.rpartition("_")[2]
    return [one for one in contents if one != kind] + [kind] * read_boolean(part)


def _add_tokens(part: Setting, stop: Any) -> list[Any]:
    """Return `rollout.stop` with the token ids of a setting of earlier versions at its end."""
    tokens = coerce(FieldInfo(part.name, list[int], [], "", ""), part.value, part.source)
    return [*(stop if isinstance(stop, list) else [stop]), *tokens]


_MOVED = (
    move(
        "checkpoint.save_optimizer checkpoint.save_huggingface",
        "checkpoint.contents",
        _set_contents,
        CheckpointConfig().contents,
    ),
    move(" ".join(_TRACKERS), "observability.trackers", _add_tracker, ObservabilityConfig().trackers),
    move("rollout.stop_token_ids", "rollout.stop", _add_tokens, []),
    move("trainer.val_only", "trainer.total_steps", lambda one, steps: 0 if read_boolean(one) else steps),
    move("algorithm.kl_controller", "algorithm.kl_target", _read_controller),
    move(
        "algorithm.dynamic_sampling_metric",
        "algorithm.dynamic_sampling",
        lambda one, is_on: is_on and one.value,
        False,
    ),
    AliasGroup(
        ("algorithm.cov_ratio",),
        "algorithm.options.clip_cov.ratio or kl_cov.ratio",
        _move_share,
        reads=("algorithm.policy_loss",),
    ),
    move(
        "preference.desirable_weight preference.undesirable_weight", "preference.kto_weights", _set_weight, [1.0, 1.0]
    ),
    move(" ".join(_SILENCES), "rollout.silent_seconds", _set_silence),
    AliasGroup(("layout.mode", "layout.lengths"), "layout.mode", _join_lengths, targets={"layout.mode": "layout.mode"}),
    AliasGroup(("trainer.save_final",), "trainer.save_freq", _move_final, reads=("trainer.save_freq",)),
    move("observability.status_host", "observability.status_port", _add_host),
    move(
        "rollout.async_scheduling",
        "rollout.engine_options",
        lambda part, options: {**options, "async_scheduling": part.value} if isinstance(options, dict) else options,
        {},
    ),
)
_PATTERNS = {**PATTERNS, "teachers.*.recompute_granularity": Ignored("only a backward pass recomputes")}
_ALIASES = {**name_tables.ALIASES, **trl.ALIASES, **_EARLIER}
_GROUPS = (*name_groups.GROUPS, *trl.GROUPS, *(_merge(*pair) for pair in _MERGED.items()), *_MOVED)
# In a recipe of verl's SFT trainer, its meanings come first.
_OF_SFT = {**_ALIASES, **sft_names.ALIASES}, (*sft_names.GROUPS, *_GROUPS), {**_PATTERNS, **sft_names.OWN_PATTERNS}


def alias_targets() -> dict[str, str | None]:
    """Return the names of verl, TRL and earlier versions of this package that a recipe may use.

    Each has the setting that it is a plain rename of, or `None` if it needs translation.
    """
    found = {name: one.target if isinstance(one, Renamed) else None for name, one in _OF_SFT[0].items()}
    return found | {name: group.targets.get(name) for group in _OF_SFT[1] for name in group.names}


def find_ranks(settings: Sequence[Setting]) -> int | None:
    """Return the number of ranks of a verl recipe's trainer and separate engines together, or `None`."""
    values = {setting.name: setting.value for setting in settings}
    is_verl, ranks = verl_defaults.is_verl(settings), 0
    for section in ("trainer", "rollout"):
        nodes, gpus = values.get(f"{section}.nnodes", 1), values.get(f"{section}.n_gpus_per_node")
        gpus = 8 if gpus is None and is_verl and section == "trainer" else gpus
        if all(isinstance(number, int) and number > 0 for number in (nodes, gpus)):
            ranks += nodes * gpus
    return ranks or None


def translate(
    settings: Sequence[Setting], fields: Mapping[str, FieldInfo], mistakes: Mistakes
) -> tuple[list[Setting], list[str]]:
    """Translate settings with foreign names; return settings of this package, and a note per setting without effect.

    Args:
        settings: in order; the later of two equal names wins.
        mistakes: collects the errors, which are not raised.
    """
    latest: dict[str, Setting] = {}
    for setting in _drop_nulls(settings):
        latest.pop(setting.name, None)  # so that a repeated name moves to its later position
        if setting.value not in _NOTHING:
            latest[setting.name] = replace(setting, value=_expand_home(setting.value))
    is_verl, is_sft = verl_defaults.is_verl(settings), sft_names.is_sft(settings)
    aliases, groups, patterns = _OF_SFT if is_sft else (_ALIASES, _GROUPS, _PATTERNS)
    if is_sft:
        sft_names.add_defaults(latest)
    elif is_verl:
        verl_defaults.add_defaults(latest)
    translated: list[Setting] = []
    repeated: list[tuple[Setting, SameAs]] = []
    notes = ["read as names of verl's SFT trainer: launch/pretrain_sft.py trains with them"] if is_sft else list[str]()
    for group in groups:
        parts = {name: latest.pop(name) for name in group.names if name in latest}
        reads = {name: latest[name] for name in group.reads if name in latest}
        with mistakes.collect(*group.reads, *group.targets.values()):
            for found in group.combine(parts | reads) if parts else ():
                if isinstance(found, str):
                    notes.append(found)
                elif isinstance(alias := aliases.get(found.name), SameAs):
                    repeated.append((found, alias))
                else:
                    translated.append(found)
    idle: list[tuple[Setting, str]] = []
    for setting in latest.values():
        alias = aliases.get(re.sub(r"^teachers\.[^.]+", "teachers.*", setting.name))
        with mistakes.collect(alias.target if isinstance(alias, Renamed) else setting.name):
            if isinstance(alias, Renamed):
                translated += _rename(setting, alias, fields)
            elif isinstance(alias, SameAs):
                repeated.append((setting, alias))
            elif alias is None and (setting.name in fields or _REWARD.fullmatch(setting.name)):
                translated.append(setting)
            else:
                if alias is None:
                    pattern = next((pattern for pattern in patterns if fnmatchcase(setting.name, pattern)), None)
                    if pattern is None:
                        raise unknown_key_error(setting.name, setting.source, fields, alias_targets())
                    alias = patterns[pattern]
                idle += _ignore(setting, alias)
    translated, more = _join_rewards(translated, mistakes)
    notes += more
    for setting, alias in repeated:
        with mistakes.collect(alias.target):
            notes += _compare(setting, alias, translated, fields)
    notes = [*verl_defaults.describe_assumed(translated, fields), *filter(None, notes)]
    notes += verl_defaults.describe_unused(translated) if is_verl else []
    return translated, [*sorted(notes, key=lambda text: text.startswith("ignored: ")), *_fold(idle)]


def _fold(idle: Sequence[tuple[Setting, str]]) -> list[str]:
    """Return one note for all settings that change no result, with the reason if it is a single one."""
    if len(idle) < 2:
        return [note(*one) for one in idle]
    names = ", ".join(setting.name for setting, _ in idle[:_NAMED])
    more = f" and {len(idle) - _NAMED} more" if len(idle) > _NAMED else ""
    return [f"ignored: {len(idle)} settings without effect on the results (reasons: docs/verl_keys.md): {names}{more}"]


def _expand_home(value: Any) -> Any:
    """Expand a leading `~/` of a text, or of each text in a list, to the user's home, as verl does."""
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


def _rename(setting: Setting, alias: Renamed, fields: Mapping[str, FieldInfo]) -> list[Setting]:
    is_listed = any(same(setting.value, theirs) for theirs, _ in alias.values)
    is_ours = setting.name == alias.target or fields[alias.target].accepts_none
    if setting.value is None and not is_listed and not is_ours:
        return []  # null means "not given" in verl
    if is_listed or alias.closed:
        return [look_up(setting, alias.target, alias.values, f"set {alias.target} instead, see --help")]
    return [replace(setting, name=alias.target)]


def _ignore(setting: Setting, alias: Ignored | Only) -> list[tuple[Setting, str]]:
    if setting.value is None:
        return []
    if isinstance(alias, Ignored):
        return [(setting, alias.reason)]
    if any(same(setting.value, allowed) for allowed in alias.allowed):
        return []
    accepted = " or ".join(repr(allowed) for allowed in (alias.allowed or (None,)))
    raise UserError(
        f"{setting.name} = {setting.value!r} is not supported",
        source=setting.source,
        expected=f"{accepted}: {alias.reason}",
        hint=f"remove {setting.name}",
    )


def _compare(
    setting: Setting, alias: SameAs, translated: Sequence[Setting], fields: Mapping[str, FieldInfo]
) -> list[str]:
    value = next((ours for theirs, ours in alias.values if same(setting.value, theirs)), setting.value)
    strongest = max(
        (other for other in translated if other.name == alias.target),
        key=lambda other: (other.layer, not other.weak),
        default=None,
    )
    if strongest is None and alias.strict:
        strongest = Setting(alias.target, fields[alias.target].default, "its default", setting.layer)
    if value is None or (strongest is not None and same(value, strongest.value)):
        return []
    if alias.strict and setting.name.startswith("critic.") and verl_defaults.has_no_critic(translated, fields):
        return [note(setting, "there is no critic")]
    if strongest is None or (strongest.layer > setting.layer if alias.strict else strongest.layer != setting.layer):
        return [f"ignored: {describe(setting)}, {alias.target} decides"]
    raise UserError(
        f"{setting.name} = {setting.value!r}, but {describe(strongest)}",
        source=setting.source,
        expected=f"the value of {alias.target}: both mean the same here",
        hint=f"remove {setting.name}",
    )


def format_help(topic: str = "") -> str:
    """Return every setting with its type, default, unit and meaning, imported plugins included.

    Args:
        topic: a section or setting, for its part alone (UserError if there is none).
    """
    fields = list_fields() | list_options()
    if topic and not (fields := {name: info for name, info in fields.items() if f"{name}.".startswith(f"{topic}.")}):
        raise UserError(
            f"there is no section or setting {topic!r}",
            source="command line",
            expected=f"--help SECTION: {', '.join(section_classes())}",
            hint="--help alone lists every setting",
        )
    blocks = [] if topic else [_SYNTAX]
    for section, section_class in section_classes().items():
        doc = (section_class.__doc__ or "").strip().splitlines()[0]
        lines = [f"[{section}]  {doc}"]
        for info in fields.values():
            if info.section == section:
                default = "required" if info.required else f"default: {render(info.default)}"
                unit = f"  [{info.unit}]" if info.unit else ""
                lines.append(f"  {info.name}  ({info.describe_type()}; {default}){unit}")
                lines += [f"      {line}" for line in textwrap.wrap(info.doc, WIDTH - 6)]
        if len(lines) > 1 or not topic:
            blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def format_names() -> str:
    """Format the accepted verl names and their translations for `--help`."""
    renamed = [(name, alias.target) for name, alias in name_tables.ALIASES.items() if isinstance(alias, Renamed)]
    pairs = [(name, target) for name, target in renamed if name != target]
    pairs += [(" + ".join(group.names), group.meaning) for group in name_groups.GROUPS]
    lines = ["[verl names]  accepted in recipes and on the command line"]
    for name, target in sorted(pairs):
        lines += textwrap.wrap(f"{name} -> {target}", WIDTH - 2, initial_indent="  ", subsequent_indent="      ")
    others = sorted(name for name, alias in name_tables.ALIASES.items() if not isinstance(alias, Renamed))
    text = f"Without effect or with one value only (reasons: docs/verl_keys.md): {', '.join(others)}."
    lines += textwrap.wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines) + "\n"
