# SPDX-License-Identifier: Apache-2.0
"""An example reward service for `reward.function`: POST /score with the math rule.

python tools/reward_service.py --port 8700
torchrun ... launch/pretrain_grpo.py RECIPE.yaml reward.function=http://localhost:8700/score
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from megatron_rl.rewards.scoring import marks_answer, score_math
from tools._arguments import Arguments

app = FastAPI(title="Reward service")


class Sample(BaseModel):
    """One response to score."""

    prompt_id: int
    sample_index: int
    data_source: str
    prompt: str
    response: str
    ground_truth: str | list[str]
    extra_info: dict[str, Any] = {}


class Batch(BaseModel):
    """One request."""

    samples: list[Sample]


@app.post("/score")
async def score(batch: Batch) -> dict[str, list[dict[str, float]]]:
    """Score each sample by the math rule and the rule `format`."""
    # Requests are scored one at a time; `uvicorn --workers` adds processes.
    return {
        "scores": [
            {
                **score_math(sample.response, sample.ground_truth, sample.data_source),
                "format": marks_answer(sample.response),
            }
            for sample in batch.samples
        ]
    }


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description="Serve the math rule over HTTP; Ctrl-C or SIGTERM ends it.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8700, help="port to listen on (default: %(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    options = build_parser().parse_args(arguments)
    # uvicorn shuts down on these signals and raises them again, which would exit with an error.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
