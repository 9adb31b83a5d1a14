# SPDX-License-Identifier: Apache-2.0
"""Make three chat tasks for one run (`data.sources`): swaps, products with a tool, and a program's pairs; no network.

Swaps are answered at once. Products need the tool `calculator`. Pairs are to be sorted for the program in
launch/recipes/second_try.py, which says no to a wrong answer once. Most demonstrations are wrong:
swaps and pairs as they were given, rounded products without a call.

Invariants: the same arguments give byte-identical files; training and validation share no prompt; `task.json` is
written last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation

from megatron_rl.types import UserError
from tools._arguments import Arguments
from tools.make_calculator_task import estimate
from tools.make_toy_task import ARGUMENTS_FILE, already_made, write_model

SOURCES = ("swaps", "products", "pairs")
FILES = (*(f"{name}{kind}.jsonl" for name in SOURCES for kind in ("", "_validation")), "demonstrations.jsonl")
MODEL = {"hidden_size": 128, "intermediate_size": 512, "heads": 4, "kv_heads": 2, "layers": 3}
LOWEST, HIGHEST = 10, 99
_CALL = ('<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>')
_TOOL = {"type": "function", "function": {"name": "calculate", "description": "", "parameters": {}}}
_TEMPLATE = """\
{%- if tools %}{{ '<|tools|>' }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

Row = dict[str, Any]


def write_tokenizer(directory: Path) -> int:
    """Write a tokenizer with one token per byte, role and half of a tool call; return the number of tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = (
        "<|endoftext|>",
        "<|begin|>",
        "<|end|>",
        "<|tools|>",
    )  # the ids of padding, begin and end are write_model's
    marks += tuple(f"<|{role}|>" for role in ("system", "user", "assistant", "tool"))
    pieces = (*marks, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    rust = Tokenizer(models.BPE({text: number for number, text in enumerate(pieces)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    rust.add_tokens([AddedToken(text, normalized=False) for text in _CALL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=rust,
        eos_token="<|end|>",
        bos_token="<|begin|>",
        pad_token="<|endoftext|>",
        chat_template=_TEMPLATE,
    )
    fast.save_pretrained(directory)
    return len(fast)


def make_rows(task: dict[str, Any]) -> dict[str, list[Row]]:
    """Make the rows of all files."""
    generator = random.Random(task["seed"])
    numbers = range(LOWEST, HIGHEST + 1)
    pairs = [(left, right) for left in numbers for right in numbers]
    chosen = generator.sample(pairs, task["train"] + task["validation"])
    files: dict[str, list[Row]] = {name.removesuffix(".jsonl"): [] for name in FILES}
    for number, (left, right) in enumerate(chosen):
        given, swapped = f"{left},{right}", f"{right},{left}"
        ordered = f"{min(left, right)},{max(left, right)}"
        call = f"{left}*{right}".join(_CALL)
        questions = {  # and answers, right and wrong
            "swaps": (f"swap {given}", swapped, swapped, given),
            "products": (f"{left}*{right}=", str(left * right), call, str(estimate(left * 10, right * 10) // 100)),
            "pairs": (f"sort {given}", ordered, ordered, given),
        }
        for name, (question, answer, good, bad) in questions.items():
            messages = [{"role": "user", "content": question}]
            files[f"{name}_validation" if number >= task["train"] else name].append(
                {"prompt": messages, "answer": answer, "data_source": f"toy_{name}"}
            )
            if number >= task["train"]:
                continue
            tools = {"tools": [_TOOL]} if name == "products" else {}
            response = bad if generator.random() < task["error_rate"] else good
            files["demonstrations"].append({"prompt": messages, "response": response, **tools})
            if name != "swaps":  # the second turn
                said = [("tool", answer)] if tools else [("user", "no")]
                messages = [*messages, {"role": "assistant", "content": call if tools else bad}]
                messages += [{"role": role, "content": text} for role, text in said]
                response = answer if tools or generator.random() < 0.5 else bad
                files["demonstrations"].append({"prompt": messages, "response": response, **tools})
    return files


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = Arguments(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write (created)", metavar="DIR")
    parser.add_argument("--train", type=int, default=2000, help="training prompts of each task", metavar="N")
    parser.add_argument("--validation", type=int, default=64, help="validation prompts of each task", metavar="N")
    parser.add_argument("--error-rate", type=float, default=0.6, metavar="P", help="share of wrong demonstrations")
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts and of the weights")
    task = vars(parser.parse_args(arguments))
    out = task.pop("out")
    try:
        if already_made(out, task, (*FILES, ARGUMENTS_FILE)):
            print(f"{out} already holds this task (same arguments); nothing to do")
            return 0
        vocab_size = write_tokenizer(out / "model")
        parameters = write_model(out / "model", task | MODEL, vocab_size)
        for name, rows in make_rows(task).items():
            (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (out / ARGUMENTS_FILE).write_text(json.dumps(task, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except (UserError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {parameters:,} parameters; {task['train']} training, {task['validation']} validation prompts each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
