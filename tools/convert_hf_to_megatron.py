# SPDX-License-Identifier: Apache-2.0
"""Convert a model in Hugging Face format to a Megatron distributed checkpoint (torch_dist) for any layout.

    python tools/convert_hf_to_megatron.py --hf DIR --out DIR [--processes 4]
    torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py --hf DIR --out DIR

The result includes config and tokenizer; megatron-core loads it, too. Incomplete output has the suffix .partial;
rerunning resumes it.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from tools._arguments import Arguments
from tools._conversion_command import add_output_options, run_conversion
from tools.conversion.conversion import DTYPES, convert_to_megatron


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--hf", type=Path, required=True, help="model directory: config.json and *.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="new directory for the checkpoint")
    add_output_options(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    return run_conversion(
        partial(
            convert_to_megatron,
            options.hf,
            options.out,
            dtype=DTYPES.get(options.dtype),
            file_bytes=int(options.file_gib * 2**30),
            force=options.force,
        ),
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
