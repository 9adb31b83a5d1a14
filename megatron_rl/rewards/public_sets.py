# SPDX-License-Identifier: Apache-2.0
r"""Scorers for public data sets, selected by the column `data_source`.

They equal verl's `default_compute_score`, including its quirks: GSM8K compares the characters after "####", MATH uses
Hendrycks' normalization, and DAPO and AIME take the last "Answer:" after Minerva's, or without one the last box
literally, and give -1 if wrong.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

from megatron_rl.extension.reasoning_gym import score_reasoning_gym
from megatron_rl.extension.registry import GYM
from megatron_rl.rewards.answers import read_to_closing_brace
from megatron_rl.types import UserError

_END, _BOX_END = 300, 100  # last characters of a response, searched for the answer, and for DAPO's box
_NO_ANSWER = "[INVALID]"  # verl's
_MATH_TEXTS = (  # replaced in this order
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
_MINERVA_TEXTS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_MINERVA_REMOVED = (  # between bars
    "square|ways|integers|dollars|mph|inches|hours|km|units|\\ldots|sue|points|feet|minutes|digits|cents|degrees|cm|gm|"
    "pounds|meters|meals|edges|students|childrentickets|multiples|\\text{s}|\\text{.}|\\text{\ns}|\\text{}^2|\\text{}^3|"
    '\\text{\n}|\\text{}|\\mathrm{th}|^\\circ|^{\\circ}|\\;|,\\!|{,}|"|\\dots'
)
_MINERVA_FORMS = (
    (r".*?\$(.*?)\$.*", r"$\1$"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
    (r"\$", ""),
)
_MOST_ANSWER_TAGS = 10


class _NoForm(ValueError):
    """Error of a formula that cannot be normalized; the texts are then compared unchanged."""


def score_gsm8k(response: str, truth: str) -> float:
    """Return 1.0 if the last "#### NUMBER" equals the truth as text, ignoring commas."""
    found = re.findall(r"#### (-?[0-9.,]+)", response[-_END:])
    return float(bool(found) and found[-1].replace(",", "") == truth)


def score_math_set(response: str, truth: str) -> float:
    r"""Return 1.0 if the last \boxed{} equals the truth after Hendrycks' normalization."""
    answer = _last_box(response)
    if answer is None:
        return 0.0
    try:
        return float(_normalize_math(answer) == _normalize_math(truth))
    except _NoForm:
        return float(answer == truth)


def score_math_dapo(response: str, truth: str) -> dict[str, float]:
    r"""Score 1.0 if the last "Answer:" equals the truth after Minerva's normalization, else -1.0.

    Without "Answer:", the last \boxed{} of the last 100 characters must equal the truth literally.
    """
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-_END:])
    answer = _normalize_minerva(found[-1] if found else _NO_ANSWER)
    _, mark, rest = response[-_BOX_END:].rpartition("\\boxed{")
    box = read_to_closing_brace(rest) if mark and answer == _NO_ANSWER else None
    is_right = answer == _normalize_minerva(truth) if box is None else box == truth
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right)}


def score_search(response: str, truth: dict[str, Any]) -> float:
    """Return 1.0 if the last <answer> is in truth["target"], without articles and punctuation, else 0.0.

    A correct response with more than ten <answer> tags gets 0.25.
    """
    answers = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    targets = [truth["target"]] if isinstance(truth["target"], str) else truth["target"]
    if not answers or _normalize_words(answers[-1]) not in map(_normalize_words, targets):
        return 0.0
    tags = max(response.count("<answer>"), response.count("</answer>"))
    return 0.25 if tags > _MOST_ANSWER_TAGS else 1.0


_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
_SCORERS: dict[str, Callable[[str, Any], float | dict[str, float]]] = {
    "openai/gsm8k": score_gsm8k,
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), score_math_set),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), score_math_dapo),
    **dict.fromkeys((f"searchR1_{name}" for name in _SEARCH), score_search),
}
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_CODE = "its responses are programs, which need a sandbox"
_NOT_SERVED = {
    **dict.fromkeys((f"numina_{name}" for name in _NUMINA), "verl scores it with PRIME's grader, a package of its own"),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _CODE),
    "hiyouga/geometry3k": "its prompts hold images, and verl scores it with the package mathruler",
}


def find_scorer(data_source: str) -> Callable[[str, Any], float | dict[str, float]]:
    """Return the scorer(response, ground truth) of a data set (UserError if there is none)."""
    if data_source.startswith("aime"):
        return score_math_dapo
    if data_source.startswith(GYM):
        return score_reasoning_gym
    if data_source in _SCORERS:
        return _SCORERS[data_source]
    reason = f": {_NOT_SERVED[data_source]}" if data_source in _NOT_SERVED else ""
    raise UserError(
        f'the rule by_data_source has no scorer for the data_source "{data_source}"{reason}',
        source="reward.function",
        expected=", ".join([*_SCORERS, "aime*", f"{GYM}*"]),
        hint="name a service of yours as reward.function"
        if reason.endswith(_CODE)
        else "use reward.function=math, or a function of yours",
    )


def _last_box(text: str) -> str | None:
    """Return the content of the last \\boxed as the MATH data set's code does; `None` where that code fails."""
    bare = "\\boxed "
    if bare in text:
        return text.rpartition(bare)[2].partition("$")[0]
    _, mark, rest = text.rpartition("\\boxed")
    return read_to_closing_brace(rest[1:]) if mark and rest.startswith("{") else None


def _normalize_math(text: str) -> str:
    """Normalize an answer as Hendrycks et al., Measuring mathematical problem solving with the MATH dataset."""
    for old, new in _MATH_TEXTS:
        text = text.replace(old, new)
    value, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise _NoForm
    text = value.replace("\\\\%", "").replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    name, *sides = text.split("=")
    if len(sides) == 1 and len(name) <= 2:
        text = sides[0]
    text = _brace_fractions(_brace_roots(text).replace(" ", ""))
    if text == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)\Z", r"\\frac{\1}{\2}", text)


def _brace_roots(text: str) -> str:
    head, *tails = text.split("\\sqrt")
    if "" in tails:
        raise _NoForm
    return head + "".join(f"\\sqrt{tail}" if tail[0] == "{" else f"\\sqrt{{{tail[0]}}}{tail[1:]}" for tail in tails)


def _brace_fractions(text: str) -> str:
    r"""Write \frac12 as \frac{1}{2} and \frac1{72} as \frac{1}{72}."""
    braced, *tails = text.split("\\frac")
    for tail in tails:
        if not tail:
            raise _NoForm
        if tail[0] == "{":
            braced += f"\\frac{tail}"
        elif len(tail) == 1:
            return text
        else:
            below = tail[1:] if tail[1] == "{" else f"{{{tail[1]}}}{tail[2:]}"
            braced += f"\\frac{{{tail[0]}}}{below}"
    return braced


def _normalize_minerva(text: str) -> str:
    """Normalize an answer as Minerva (Lewkowycz et al., arXiv 2206.14858, appendix D)."""
    text = text.rpartition("=")[2]
    for old, new in (*_MINERVA_TEXTS, *((removed, "") for removed in _MINERVA_REMOVED.split("|"))):
        text = text.replace(old, new)
    for pattern, form in _MINERVA_FORMS:
        text = re.sub(pattern, form, text)
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _normalize_words(text: str) -> str:
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", letters).split())
