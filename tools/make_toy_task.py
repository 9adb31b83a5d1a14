# SPDX-License-Identifier: Apache-2.0
"""Make an arithmetic task that a small model learns on a laptop: tokenizer, prompts, model; no network.

A prompt is "37+45=", its answer "82", one token per character, so a few million parameters suffice to watch GRPO work.
Most `demonstration`s forget the carry ("37+45=72"), so a warm-started model is often wrong, and improves from the
reward alone. The `_mixed` files add prompts with one more digit, never demonstrated and so answered wrong: the prompt
predicts the reward, which a critic can learn. The `preferences` files prefer answers to wrong ones; in training, of
all prompts except the validation sums, with more that are off by one, and wrong numbers of digits.

Invariants: the same arguments give byte-identical files; training and validation share no pair of operands (in either
order, under any operation); no prompt occurs twice in a file; results are not negative; `task.json` is written last.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

import sentencepiece

from megatron_rl.types import UserError
from tools._arguments import Arguments

ARGUMENTS_FILE = "task.json"
FILES = (
    "tokenizer.model",
    "train.jsonl",
    "validation.jsonl",
    "train_mixed.jsonl",
    "validation_mixed.jsonl",
    "preferences.jsonl",
    "preferences_validation.jsonl",
    "model/config.json",
    "model/model.safetensors",
    "model/tokenizer.model",
    ARGUMENTS_FILE,
)
DATA_SOURCE = "toy_arithmetic"
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
HEAD_DIMS = (32, 64)  # supported by the rollout engine's CPU attention
MAX_POSITIONS = 256
MAX_LONG_SHARE = 0.9  # guarantees enough pairs of long operands
MAX_PREFERENCES = 10_000  # prompts

Row = dict[str, str]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Arguments(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write (created)", metavar="DIR")
    parser.add_argument("--force", action="store_true", help="write into a directory that is not empty")
    parser.add_argument("--train", type=int, default=4000, help="training prompts", metavar="N")
    parser.add_argument("--validation", type=int, default=256, help="validation prompts", metavar="N")
    parser.add_argument("--max-operand", type=int, default=99, help="largest operand; the smallest is 0", metavar="N")
    parser.add_argument("--operations", default="+", help="any of + and -; use --operations=- for - alone")
    parser.add_argument(
        "--slip-rate",
        type=float,
        default=0.65,
        metavar="P",
        help="share of demonstrations that forget every carry and borrow",
    )
    parser.add_argument(
        "--long-share",
        type=float,
        default=0.4,
        metavar="P",
        help="share of the mixed prompts whose operands have one digit more than --max-operand",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts and of the weights")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the model", metavar="H")
    parser.add_argument(
        "--intermediate-size",
        type=int,
        default=argparse.SUPPRESS,
        metavar="F",
        help="width of the MLP (default: 5 x hidden size)",
    )
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--heads", type=int, default=4, help="attention heads; hidden size / heads must be 32 or 64")
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads")
    return parser


def check_arguments(task: dict[str, Any]) -> None:
    """Refuse arguments.

    Raises:
        UserError: an argument is out of range.
    """

    def refuse(flag: str, found: Any, expected: str) -> None:
        raise UserError(f"--{flag} {found}", source="command line", expected=expected, hint=f"change --{flag}")

    for name in ("train", "validation", "max_operand", "intermediate_size", "layers"):
        if task[name] < 1:
            refuse(name.replace("_", "-"), task[name], "a number greater than 0")
    if not 0 <= task["seed"] < 2**63:
        refuse("seed", task["seed"], "0 <= seed < 2^63")
    if (
        not task["operations"]
        or set(task["operations"]) - set("+-")
        or len(set(task["operations"])) < len(task["operations"])
    ):
        refuse("operations", repr(task["operations"]), "+, - or +-")
    if not 0.0 <= task["slip_rate"] <= 1.0:
        refuse("slip-rate", task["slip_rate"], "a share between 0 and 1")
    if not 0.0 <= task["long_share"] <= MAX_LONG_SHARE:
        refuse("long-share", task["long_share"], f"a share between 0 and {MAX_LONG_SHARE}")
    hidden, heads, kv_heads = task["hidden_size"], task["heads"], task["kv_heads"]
    if heads < 1 or heads % 4:
        refuse("heads", heads, "a multiple of 4, so that 4 ranks can share them")
    if kv_heads < 1 or heads % kv_heads:
        refuse("kv-heads", kv_heads, f"a divisor of --heads = {heads}")
    if hidden % heads or hidden // heads not in HEAD_DIMS:
        refuse("hidden-size", hidden, f"{' or '.join(str(heads * d) for d in HEAD_DIMS)} with {heads} heads")


def make_prompts(task: dict[str, Any]) -> tuple[list[Row], list[Row], list[Row]]:
    """Make rows for training, validation and preferences; no operands of validation are in the others.

    Raises:
        UserError: too few pairs of operands.
    """
    generator = random.Random(task["seed"])
    pairs = [(a, b) for a in range(task["max_operand"] + 1) for b in range(a + 1)]
    generator.shuffle(pairs)
    validation: list[tuple[str, int]] = []
    while pairs and len(validation) < task["validation"]:
        validation += _expressions(*pairs.pop(), task["operations"])
    train = [expression for pair in pairs for expression in _expressions(*pair, task["operations"])]
    if len(validation) < task["validation"] or len(train) < task["train"]:
        raise UserError(
            f"{task['train']} training and {task['validation']} validation prompts requested; with these operands "
            f"there are {len(train)} and {len(validation)}",
            source="--train, --validation",
            expected="at most as many prompts as there are",
            hint="raise --max-operand, or ask for fewer prompts",
        )
    train_rows, validation_rows = (
        [_row(prompt, answer) for prompt, answer in generator.sample(expressions, size)]
        for expressions, size in ((train, task["train"]), (validation, task["validation"]))
    )
    for row in train_rows:
        slips = generator.random() < task["slip_rate"]
        row["demonstration"] = forget_carries(row["prompt"]) if slips else row["answer"]
    preferred = generator.sample(train, min(len(train), MAX_PREFERENCES))
    return train_rows, validation_rows, [_row(*expression) for expression in preferred]


def mix_in_long_prompts(task: dict[str, Any], train: list[Row], validation: list[Row]) -> tuple[list[Row], list[Row]]:
    """Drop demonstrations, mix in a share of `long_share` of long prompts, and shuffle."""
    generator = random.Random(task["seed"])
    share, lowest = task["long_share"], 10 ** len(str(task["max_operand"]))
    sizes = [round(len(rows) * share / (1 - share)) for rows in (validation, train)]
    drawn: dict[tuple[int, int], Row] = {}  # one prompt per pair: the lists stay disjoint
    while len(drawn) < sum(sizes):
        smaller, larger = sorted(generator.randrange(lowest, 10 * lowest) for _ in range(2))
        drawn[larger, smaller] = _row(*generator.choice(_expressions(larger, smaller, task["operations"])))
    long = list(drawn.values())
    mixed_validation = [*validation, *long[: sizes[0]]]
    mixed_train = [*({key: row[key] for key in row if key != "demonstration"} for row in train), *long[sizes[0] :]]
    for rows in (mixed_train, mixed_validation):
        generator.shuffle(rows)
    return mixed_train, mixed_validation


def prefer_answers(task: dict[str, Any], rows: list[Row], *, hard: bool = False) -> list[Row]:
    """Pair each answer with four wrong ones: without carries, near the answer, or any number of its size.

    Args:
        task: arguments of the command.
        rows: prompts and answers.
        hard: always take those that are off by one, and allow a digit more or less.
    """
    generator, pairs = random.Random(task["seed"]), []
    for row in rows:
        prompt, answer = row["prompt"], row["answer"]
        others = [str(int(answer) + step * 10**place) for step in (-1, 1) for place in range(len(answer))]
        others += [str(generator.randrange(10 ** len(answer))) for _ in range(4)]
        first = [forget_carries(prompt)]
        if hard:
            first += [str(int(answer) + 1), str(int(answer) - 1)]
            others += [f"0{answer}", f"{answer}{generator.randrange(10)}", answer[1:], answer[:-1]]
        wrong = dict.fromkeys([*first, *generator.sample(others, len(others))])
        chosen = [text for text in wrong if text and text != answer and not text.startswith("-")][:4]
        pairs += [{"prompt": prompt, "chosen": answer, "rejected": text} for text in chosen]
    generator.shuffle(pairs)
    return pairs


def forget_carries(prompt: str) -> str:
    """Compute digit by digit, without carries or borrows: "37+45=" -> "72"."""
    sign = -1 if "-" in prompt else 1
    left, right = (int(number) for number in prompt.rstrip("=").replace("-", "+").split("+"))
    places = range(max(len(str(left)), len(str(right))))
    return str(sum((left // 10**place + sign * (right // 10**place)) % 10 * 10**place for place in places))


def _row(prompt: str, answer: int) -> Row:
    return {"prompt": prompt, "answer": str(answer), "data_source": DATA_SOURCE}


def _expressions(larger: int, smaller: int, operations: str) -> list[tuple[str, int]]:
    found = {}
    if "+" in operations:
        found |= {f"{larger}+{smaller}=": larger + smaller, f"{smaller}+{larger}=": larger + smaller}
    if "-" in operations:
        found[f"{larger}-{smaller}="] = larger - smaller
    return list(found.items())


def train_tokenizer(alphabet: str) -> bytes:
    """Train a sentencepiece model with one piece per character; it round-trips exactly."""
    model = io.BytesIO()  # no file names inside the model: its bytes depend on the alphabet only
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([alphabet]),
        model_writer=model,
        model_type="char",
        vocab_size=len(alphabet) + 4,
        character_coverage=1.0,
        split_digits=True,
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


def write_model(directory: Path, task: dict[str, Any], vocab_size: int) -> int:
    """Write a randomly initialized Qwen2ForCausalLM in HF format, float32.

    Returns:
        Number of parameters (tied embeddings counted once).
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=task["hidden_size"],
        intermediate_size=task["intermediate_size"],
        num_hidden_layers=task["layers"],
        num_attention_heads=task["heads"],
        num_key_value_heads=task["kv_heads"],
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task["seed"])
        model = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):  # zero by default, which would hide a bias lost in conversion
                torch.nn.init.normal_(parameter, std=config.initializer_range)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def write_policy(out: Path, task: dict[str, Any], proto: bytes) -> int:
    """Remove `task.json`, write tokenizer and model; return the number of parameters."""
    (out / "model").mkdir(parents=True, exist_ok=True)
    (out / ARGUMENTS_FILE).unlink(missing_ok=True)
    for file in (out / "tokenizer.model", out / "model" / "tokenizer.model"):
        file.write_bytes(proto)
    vocab_size = sentencepiece.SentencePieceProcessor(model_proto=proto).vocab_size()
    return write_model(out / "model", task, vocab_size)


def write_task(out: Path, task: dict[str, Any]) -> int:
    """Write all files, `task.json` last; return the number of parameters."""
    train, validation, preferred = make_prompts(task)
    mixed_train, mixed_validation = mix_in_long_prompts(task, train, validation)
    parameters = write_policy(out, task, train_tokenizer("0123456789=" + "".join(sorted(task["operations"]))))
    for name, rows in (
        ("train", train),
        ("validation", validation),
        ("train_mixed", mixed_train),
        ("validation_mixed", mixed_validation),
        ("preferences", prefer_answers(task, preferred, hard=True)),
        ("preferences_validation", prefer_answers(task, validation)),
    ):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (out / ARGUMENTS_FILE).write_text(json.dumps(task, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return parameters


def already_made(out: Path, task: dict[str, Any], files: Sequence[str] = FILES) -> bool:
    """Whether `out` contains this task, made with the same arguments.

    Raises:
        UserError: `out` contains something else.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file", source="--out", expected="a directory", hint="choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return False
    hint = "choose another --out, or remove its files"
    try:
        made = json.loads((out / ARGUMENTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        made = None
    missing = [name for name in files if not (out / name).is_file()]
    if not isinstance(made, dict) or missing:
        raise UserError(
            f"{out} is not empty and holds no complete task (missing: {', '.join(missing) or 'arguments'})",
            source="--out",
            expected="a new or empty directory",
            hint=hint,
        )
    if made != task:
        keys = [key for key in sorted(made.keys() | task) if made.get(key) != task.get(key)]
        changes = ", ".join(f"{key} {made.get(key)} (now {task.get(key)})" for key in keys)
        raise UserError(
            f"{out} holds a task made with other arguments: {changes}",
            source="--out",
            expected="the same arguments",
            hint=hint,
        )
    return True


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    options = vars(build_parser().parse_args(arguments))
    out, force = options.pop("out"), options.pop("force")
    options.setdefault("intermediate_size", 5 * options["hidden_size"])
    try:
        check_arguments(options)
        if not force and already_made(out, options):
            print(f"{out} already holds this task (same arguments); nothing to do")
            return 0
        parameters = write_task(out, options)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file in sorted(file for file in out.rglob("*") if file.is_file()):
        print(f"{file.stat().st_size:>10,} bytes  {file}")
    print(f"model: {parameters:,} parameters; {options['train']} training, {options['validation']} validation prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
