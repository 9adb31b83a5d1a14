# SPDX-License-Identifier: Apache-2.0
"""Unpack a GGUF file to a model directory in Hugging Face format: float32 weights, tokenizer, chat template.

    python tools/unpack_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf --out models/SmolLM2-135M-Instruct

Quantized tensors are dequantized by the package gguf and keep their rounding error. transformers reads the config and
the tokenizer. (It reads the weights as well, but refuses to save a model that it read from a quantized file.)
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

import numpy as np
import torch

from megatron_rl.checkpoint.files import publish
from megatron_rl.run.command_line import end_program
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import model_shape_from_config
from tools._arguments import Arguments

# Architectures of GGUF whose unpacked weights are compared with those that transformers reads (tests/tools). llama
# includes Mistral and SmolLM2; its rows of Q and K are ordered by rotary pairs.
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help=f"model of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write; must not exist")
    return parser


def open_file(file: Path) -> Any:
    """Open a GGUF file with gguf's reader.

    Raises:
        UserError: the package is absent, or the file is cut or of another format or architecture.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "the package gguf is not installed",
            source="the Python environment",
            expected="gguf, which reads GGUF files",
            hint="bash launch/setup.sh, or: pip install gguf",
        ) from error
    try:
        reader = gguf.GGUFReader(file)
        architecture = reader.fields["general.architecture"].contents()
    except (OSError, ValueError, LookupError) as error:
        raise UserError(
            f"{file} cannot be read: {error}",
            source="command line: FILE.gguf",
            expected="a complete GGUF file",
            hint="the file may be missing or half downloaded",
        ) from error
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{file.name} holds a model of the architecture {architecture}",
            source=str(file),
            expected=" or ".join(ARCHITECTURES),
            hint="download the model in Hugging Face format instead",
        )
    return reader


def read_config(file: Path) -> Any:
    """Return the transformers config of a file.

    Raises:
        UserError: megatron_rl does not support the model.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config._name_or_path = ""
    model_shape_from_config(config.to_dict(), source=str(file))
    return config


def read_weights(reader: Any, names: list[str], config: Any) -> dict[str, torch.Tensor]:
    """Return float32 tensors by the names of transformers.

    Args:
        names: parameters of the model; one that is absent from the file (a tied head) is left out.
    """
    import gguf

    architecture = reader.fields["general.architecture"].contents()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found = {item.name: item for item in reader.tensors}
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = {}
    for name in names:
        item = found.get(table.get_name(name, try_suffixes=(".weight", ".bias")))
        if item is None:
            continue
        values = gguf.dequantize(item.data, item.tensor_type).astype(np.float32)
        heads = num_heads.get(name.split(".")[-2])
        if heads and architecture == "llama":
            pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[name] = torch.from_numpy(np.ascontiguousarray(values))
    return weights


def unpack(file: Path, directory: Path) -> int:
    """Write a file's model to a directory in Hugging Face format; return the number of parameters.

    Raises:
        UserError: the file cannot be read, or the directory exists.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if directory.exists():
        raise UserError(
            f"{directory} exists",
            source="command line: --out",
            expected="a directory to create",
            hint="remove it, or name another one",
        )
    reader = open_file(file)
    config = read_config(file)
    model = transformers.AutoModelForCausalLM.from_config(config)
    weights = read_weights(reader, list(model.state_dict()), config)
    absent = set(model.load_state_dict(weights, strict=False).missing_keys)
    if absent - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise UserError(
            f"{file.name} lacks {', '.join(sorted(absent)[:3])} ({len(absent)} tensors)",
            source=str(file),
            expected="all weights of the model",
            hint="models in several files must be joined first (llama-gguf-split --merge)",
        )
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
    publish(partial, directory)
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    options = build_parser().parse_args(arguments)
    try:
        number = unpack(options.file, options.out)
    except UserError as error:
        return end_program(error)
    print(f"unpack_gguf: {number:,} parameters in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
