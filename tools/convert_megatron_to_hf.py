# SPDX-License-Identifier: Apache-2.0
"""Convert a Megatron distributed checkpoint to a model in Hugging Face format.

    python tools/convert_megatron_to_hf.py --checkpoint DIR --out DIR [--processes 4]
    torchrun --nproc-per-node 8 tools/convert_megatron_to_hf.py --checkpoint DIR --out DIR

DIR is a run directory (newest checkpoint), a checkpoint step_<N>, a converted checkpoint, or one written by
megatron-core (pass --config). Incomplete output has the suffix .partial; rerunning resumes it.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from tools._arguments import Arguments
from tools._conversion_command import add_output_options, run_conversion
from tools.conversion.conversion import DTYPES, CheckpointWeights, convert_to_huggingface


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint or run directory")
    parser.add_argument("--out", type=Path, required=True, help="new directory for the model")
    parser.add_argument("--role", choices=("actor", "critic"), default="actor", help="of a training checkpoint (actor)")
    parser.add_argument(
        "--config", type=Path, metavar="DIR", help="config.json and tokenizer, where the checkpoint has none"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare the digests of the checkpoint first")
    add_output_options(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = build_parser().parse_args(arguments)
    source = CheckpointWeights(options.checkpoint, options.role, options.config, verify=not options.no_verify)
    return run_conversion(
        partial(
            convert_to_huggingface,
            source,
            options.out,
            dtype=DTYPES.get(options.dtype),
            file_bytes=int(options.file_gib * 2**30),
            force=options.force,
        ),
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
