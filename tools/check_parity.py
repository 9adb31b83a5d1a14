# SPDX-License-Identifier: Apache-2.0
"""Compare transformers, Megatron and vLLM; locate, measure and explain the first difference.

    python tools/check_parity.py --hf DIR [--checkpoint DIR] --json F
    torchrun --nproc-per-node 4 tools/check_parity.py --hf DIR --layout tp=2,pp=2 --engine-tp 2 --json F

transformers on the HF directory is the reference; Megatron loads --checkpoint or the HF directory; the engine samples
responses that all score. Compared: per-token log-probs, weights, layer outputs. Exit code: 0 equal, 1 different, 2 for
input that cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

import numpy as np
import torch.distributed as dist

from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.extension.registry import ENGINES
from megatron_rl.parallel.collectives import init_distributed
from megatron_rl.run.command_line import leave
from megatron_rl.types import UserError
from megatron_rl.weights.model_config import load_model_shape
from tools._arguments import Arguments
from tools._layouts import read_training_layout
from tools._weights import resolve_weights


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--hf", type=Path, required=True, help="model in HF format: the reference")
    parser.add_argument("--checkpoint", type=Path, help="run, training checkpoint or converted checkpoint of it")
    parser.add_argument("--layout", default="tp=1", help="of Megatron: tp=2,pp=2 (also vpp, ep; dp is the rest)")
    parser.add_argument("--sequence-parallel", action="store_true", help="Megatron's TP sequence parallelism")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all models (float32)")
    engines = [name for name, engine in ENGINES.items() if not engine.has("is_server")]
    parser.add_argument("--engine", choices=(*engines, "none"), default="vllm", help="rollout engine (vllm)")
    parser.add_argument("--engine-tp", type=int, default=1, metavar="N", help="ranks per vLLM engine (1)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one per line; default: random tokens")
    parser.add_argument("--num-prompts", type=int, default=4, metavar="N", help="random prompts (4)")
    parser.add_argument("--prompt-length", type=int, default=32, metavar="N", help="tokens of a random prompt (32)")
    parser.add_argument("--response-length", type=int, default=32, metavar="N", help="tokens that are sampled (32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here as well")
    return parser


def read_prompts(options: argparse.Namespace) -> list[np.ndarray]:
    """Return token ids.

    Raises:
        UserError: no usable prompt or no tokenizer.
    """
    if options.prompts is not None:
        tokenizer = load_tokenizer(options.hf)
        lines = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [np.asarray(tokenizer.encode(line), np.int64) for line in lines]
    else:
        vocab_size, rng = load_model_shape(options.hf).vocab_size, np.random.default_rng(0)
        prompts = [rng.integers(0, vocab_size, size=options.prompt_length) for _ in range(options.num_prompts)]
    if not prompts or min(map(len, prompts)) < 2 or options.response_length < 1 or options.engine_tp < 1:
        raise UserError(
            f"{len(prompts)} prompts, --response-length {options.response_length}, --engine-tp {options.engine_tp}",
            source="command line",
            expected="prompts of at least 2 tokens, numbers of at least 1",
            hint="leave the options out for the defaults",
        )
    return prompts


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Return the report, equal on every rank.

    Raises:
        UserError: input that cannot be compared.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout, prompts = read_training_layout(options.layout, "--layout", world_size), read_prompts(options)
    weights = resolve_weights(options.checkpoint) if options.checkpoint else None
    if world_size % options.engine_tp:
        raise UserError(
            f"--engine-tp {options.engine_tp} with {world_size} ranks",
            source="command line",
            expected="a divisor of the ranks",
            hint="start more ranks with torchrun",
        )
    process = init_distributed(timeout_minutes=30)
    from tools.parity.check import ParityCheck, run_parity  # imports megatron-core and transformers: seconds

    return run_parity(
        ParityCheck(
            hf=options.hf,
            weights=weights,
            layout=layout,
            sequence_parallel=options.sequence_parallel,
            dtype=options.dtype,
            engine=None if options.engine == "none" else options.engine,
            engine_tp_size=options.engine_tp,
            prompts=prompts,
            response_length=options.response_length,
        ),
        process,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    try:
        report = compare(options)
        from tools.parity.report import format_report

        if dist.get_rank() == 0:
            print(format_report(report))
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0 if report["verdict"] == "equal" else 1


if __name__ == "__main__":
    leave(main())
