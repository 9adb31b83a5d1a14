# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU configuration for a recipe, without a GPU.

vLLM's platform detection gets an H100; `vllm.LLM` is stopped once its configuration is made.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pydantic.fields import FieldInfo

from megatron_rl.config.schema import RunConfig
from megatron_rl.engines.protocol import EngineSpec
from megatron_rl.engines.vllm.vllm_library import prepare_vllm, register_codes, register_loader, register_model
from megatron_rl.engines.vllm.vllm_settings import check_installed, list_engine_arguments, list_engine_environment
from megatron_rl.parallel.collectives import Process
from megatron_rl.planning.admission import find_shape, read_shape
from megatron_rl.run.loading import load_config
from megatron_rl.run.models import resolve
from megatron_rl.weights.adapters import AdapterShape
from megatron_rl.weights.families import ModelShape
from megatron_rl.weights.model_config import find_adapters
from megatron_rl.weights.rollout_layout import check_engine
from tools._absent_driver import choose_cuda_platform, stand_in_for_driver

_GPUS = 8  # GPUs of a machine
_WIDTH = 90  # characters of a printed value
_LEFT_OUT = ("hf_config", "hf_text_config", "instance_id")  # model configs, and a random name


@dataclass(frozen=True)
class Setting:
    """A vLLM setting that differs from its class's default.

    Attributes:
        name: section and field.
        is_ours: whether our arguments set it; otherwise vLLM chose it.
    """

    name: str
    value: str
    default: str
    is_ours: bool


class _Configured(Exception):
    """Carries vLLM's finished configuration."""


def configure_engine(recipe: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """Return the arguments of `vllm.LLM` for a recipe, and vLLM's `VllmConfig` on a GPU.

    Raises:
        UserError: an invalid recipe, or a setting that the engine refuses.
    """
    config = load_config(recipe, overrides).config
    stand_in_for_driver()
    choose_cuda_platform()
    world = config.rollout.ranks_per_engine
    process = Process(0, world, 0, min(world, _GPUS), torch.device("cuda", 0))
    vllm = prepare_vllm(process.device)
    file = find_shape(config.model.path, recipe)
    shape = read_shape(file)
    with tempfile.TemporaryDirectory() as directory:
        spec = EngineSpec(
            model_path=directory,
            shape=shape,
            dtype=config.model.dtype,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
            config=config.rollout,
            process=process,
            seed=config.trainer.seed,
            adapters=_find_adapters(config, shape),
        )
        shutil.copy(file, Path(directory) / "config.json")
        check_engine(shape, config.rollout.engine, config.rollout.quantization, spec.adapters)
        check_installed(shape, config.rollout)
        register_model(vllm, spec)
        register_codes(spec)
        register_loader(lambda model: None)
        arguments = list_engine_arguments(spec)
        return arguments, _configure(vllm, arguments, list_engine_environment(spec) | _list_ranks(world))


def _find_adapters(config: RunConfig, shape: ModelShape) -> AdapterShape | None:
    role = resolve(config).roles["actor"]
    if config.hybrid.lora != "adapter":
        return None
    return find_adapters(shape, role.lora, role.section, is_quantized=role.is_quantized)


def _list_ranks(world_size: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, ("0", "0", str(world_size), str(world_size), "localhost", "29500"), strict=True))


def _configure(vllm: Any, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    def stop(engine_args: Any, usage_context: Any) -> None:
        raise _Configured(engine_args.create_engine_config(usage_context=usage_context))

    engine = import_module("vllm.v1.engine.llm_engine").LLMEngine
    with patch.object(engine, "from_engine_args", stop), patch.dict(os.environ, environment):
        try:
            vllm.LLM(**arguments)
        except _Configured as configured:
            return configured.args[0]
    raise AssertionError("vllm.LLM asks LLMEngine.from_engine_args")


def list_settings(config: Any, arguments: Mapping[str, Any], section: str = "") -> Iterator[Setting]:
    """List settings of a `VllmConfig` that differ from its classes' defaults.

    Args:
        config: a `VllmConfig` or a section of one.
        section: name with a trailing dot.
    """
    for item in fields(config):
        name, value, default = section + item.name, getattr(config, item.name, None), _find_default(item)
        if is_dataclass(value) and item.name not in _LEFT_OUT:
            yield from list_settings(value, arguments, f"{name}.")
        elif not item.name.startswith("_") and item.name not in _LEFT_OUT and _show(value) != _show(default):
            yield Setting(name, _show(value), _show(default), item.name in arguments)


def _find_default(item: Any) -> Any:
    """Return a field's default, which pydantic may have wrapped."""
    default, factory = item.default, item.default_factory
    if isinstance(default, FieldInfo):
        default, factory = default.default, default.default_factory or MISSING
    if factory is not MISSING:
        return factory()
    return "" if default is MISSING or str(default) == "PydanticUndefined" else default


def _show(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def print_engine(recipe: Path, overrides: Sequence[str]) -> None:
    """Print our settings and vLLM's choices."""
    arguments, config = configure_engine(recipe, overrides)
    settings = list(list_settings(config, arguments))
    print(f"\nvLLM on a GPU, for {recipe.name}; its own defaults in brackets")
    for is_ours, title in ((True, "as we say"), (False, "as vLLM decides")):
        print(f"\n  {title}:")
        for setting in settings:
            if setting.is_ours == is_ours:
                print(f"    {setting.name} = {setting.value} [{setting.default}]")
    sys.stdout.flush()
