# SPDX-License-Identifier: Apache-2.0
"""Make a task of another package that a small model learns on a laptop: tokenizer, demonstrations, model; no network.

`legs` counts animals' legs (`pip install reasoning-gym`); most demonstrations answer with the number of animals.
`guesses` is the game GuessTheNumber (`pip install textarena`); most demonstrated players count up from 1, the rest
bisect. The policy learns from the reward which pays.

Invariants: the same arguments and packages give byte-identical files; training and validation share no question;
`task.json` is written last.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

import sentencepiece

from megatron_rl.agents.environment import Done, Environment, Observation, Reply, Task, find_environment
from megatron_rl.extension.reasoning_gym import read_reasoning_gym
from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.make_toy_task import (
    ARGUMENTS_FILE,
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    already_made,
    write_policy,
)

LEGS = "reasoning-gym:leg_counting?size={size}&seed={seed}&min_animals=1&max_animals=1"
DEMONSTRATIONS = 10  # per training prompt, some good and some poor
GAME = "textarena:GuessTheNumber-v0"
LOWEST, HIGHEST = 1, 20  # range of the numbers to guess
MOST_GUESSES = 5  # enough for bisection
GAME_PROMPT = "A game begins."
MODEL = {"hidden_size": 128, "intermediate_size": 640, "heads": 4, "kv_heads": 2, "layers": 4}
MOST_PIECES = 1024

Row = dict[str, Any]


class Rows(NamedTuple):
    """The rows of a task's files."""

    demonstrations: list[Row]
    train: list[Row]
    validation: list[Row]


def make_legs(task: dict[str, Any]) -> Rows:
    """Make questions, and demonstrations in answer tags."""
    generator = random.Random(task["seed"])
    train = [row for _, row in read_reasoning_gym(LEGS.format(size=task["train"], seed=task["seed"]))]
    asked = {row["prompt"][0]["content"] for row in train}
    other = read_reasoning_gym(LEGS.format(size=20 * task["validation"], seed=task["seed"] + 1))
    unseen = {row["prompt"][0]["content"]: row for _, row in other}
    validation = [row for question, row in unseen.items() if question not in asked][: task["validation"]]
    demonstrations = []
    for row in train * DEMONSTRATIONS:
        answer = row["answer"]["answer"]
        if generator.random() < task["slip_rate"]:
            answer = re.findall(r"\d+", row["prompt"][0]["content"])[-1]
        demonstrations.append({"prompt": row["prompt"], "response": f"<answer>{answer}</answer>"})
    return Rows(demonstrations, train, validation)


def make_guesses(task: dict[str, Any]) -> Rows:
    """Make games; a demonstration is the dialog so far and the next guess."""
    generator, make_environment = random.Random(task["seed"]), find_environment(GAME)
    demonstrations = []
    for number in range(DEMONSTRATIONS * task["train"]):
        listens = generator.random() >= task["slip_rate"]
        demonstrations += play(make_environment(), number, listens)
    games = [{"prompt": GAME_PROMPT, "answer": "", "data_source": "guesses"}]
    return Rows(demonstrations, games * task["train"], games * task["validation"])


def play(environment: Environment, seed: int, listens: bool) -> Iterator[Row]:
    """Yield the turns of a player who bisects (`listens`) or counts up."""
    random.seed(seed)
    answer, said = environment.reset(Task("", "", "", {}, {}, seed=seed)), GAME_PROMPT
    lowest, highest = LOWEST, HIGHEST
    for _ in range(MOST_GUESSES):
        if isinstance(answer, Done):
            return
        said += answer.messages[0]["content"]
        guess = (lowest + highest) // 2 if listens else lowest
        yield {"prompt": said, "response": f"[{guess}]"}
        said += f"[{guess}]"
        answer = environment.step(Reply(f"[{guess}]", [], "stop"))
        if isinstance(answer, Observation) and answer.messages[0]["content"].endswith("lower."):
            highest = guess - 1
        else:
            lowest = guess + 1


TASKS: dict[str, Callable[[dict[str, Any]], Rows]] = {"legs": make_legs, "guesses": make_guesses}


def show(row: Row) -> str:
    """Format a demonstration as policy input."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        prompt = "".join(f"{message['role']}: {message['content']}\n" for message in prompt) + "assistant: "
    return prompt + row["response"]


def train_tokenizer(texts: Sequence[str]) -> bytes:
    """Train a sentencepiece model of phrases, digits and brackets; it round-trips exactly."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text.split("\n") if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=MOST_PIECES,
        hard_vocab_limit=False,
        character_coverage=1.0,
        user_defined_symbols=["\n", "[", "]", *"0123456789"],
        split_by_whitespace=False,
        split_by_unicode_script=False,
        max_sentencepiece_length=64,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=PAD_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        unk_id=UNK_ID,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("task", choices=TASKS, help="what to make")
    parser.add_argument("--out", type=Path, required=True, help="directory to write (created)", metavar="DIR")
    parser.add_argument("--train", type=int, default=400, help="training prompts", metavar="N")
    parser.add_argument("--validation", type=int, default=128, help="validation prompts", metavar="N")
    parser.add_argument("--slip-rate", type=float, default=0.7, metavar="P", help="share of poor demonstrations")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts and of the weights")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    task = vars(build_parser().parse_args(arguments))
    out, files = task.pop("out"), [f"{name}.jsonl" for name in Rows._fields]
    try:
        if already_made(out, task, (*files, ARGUMENTS_FILE)):
            print(f"{out} already holds this task (same arguments); nothing to do")
            return 0
        rows = TASKS[task["task"]](task)
        texts = [show(row) for row in rows.demonstrations[:500]]
        parameters = write_policy(out, task | MODEL, train_tokenizer(texts))
        for name, lines in zip(files, rows, strict=True):
            (out / name).write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
        (out / ARGUMENTS_FILE).write_text(json.dumps(task, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {parameters:,} parameters; {len(rows.demonstrations)} demonstrations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
