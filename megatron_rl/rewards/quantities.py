# SPDX-License-Identifier: Apache-2.0
r"""Parser for a single number in any notation: "$1,072.50", "five dollars", "1 000", "2\frac{1}{2}", "1e3", "50\%".

Units and currencies are ignored. An ambiguous dot or comma is read as in English ("1.000" is 1); a comma before other
than three digits is a decimal comma only if the caller permits it ("1,5" may be two answers). Several numbers, a
variable or an operator make no quantity; "84/7" is an unfinished division.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PER_CENT = Fraction(1, 100)
_ROUNDED_FROM = 6  # decimal places from which a number may be a rounded one, such as 1/3
_LONGEST = 500  # characters
_LONGEST_TEXT = 2000  # last characters of a text, searched for the last number

# Markup of answers.
_SPACES = re.compile(r"\\[,;:> ]|\\q?quad(?![a-z])|[~\s\u200b]")
_WRAPPED_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|emph|operatorname)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\left|\\right|\\displaystyle|\\[()\[\]]|\\?\$|(?<!\d)\*\*|\*\*(?!\d)|[`\"]|\\(?=[%$])")
_SUPERSCRIPTS = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207b]+")
_VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_CHARACTERS = str.maketrans(  # minus, Arabic separators, apostrophe, times, fraction slash; without quotes
    "\u2212\u066c\u066b\u2019\u00d7\u00b7\u2044", "-,.'**/", "\u201c\u201d"
) | {code: chr(code - 0xFEE0) for code in range(0xFF02, 0xFF5F)}  # full-width ASCII without the exclamation mark
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree")
_CURRENCY_CODE = re.compile(r"(?:USD|EUR|GBP|INR|CNY|RMB|JPY|CHF|US|R|CA|AU|HK|NT|Rs\.?)\s*(?=[\d.+-])")

# Numbers.
_DIGITS = (
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,2}(?:,\d\d)+,\d{3}(?:\.\d+)?|\d{1,3}(?:[ ]\d{3})+(?:[.,]\d+)?"
    r"|\d{1,3}(?:'\d{3})+(?:\.\d+)?|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|\d+(?:\.\d+)?|\.\d+)(?![\d,]*\d)"
)
_PLAIN = re.compile(_DIGITS)
_PLAIN_WITH_COMMA = re.compile(rf"{_DIGITS}|\d+,\d+(?!,?\d)")
_TIMES_TEN = re.compile(
    r"[eE]([+-]?\d{1,3})(?!\w)|\s*(?:[*x]|\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|(\d)(?!\d))"
)
_FRACTION = re.compile(
    rf"(?:(\d+)(?:\s+|(?=\\)))?"  # of a mixed number
    rf"(?:\\[dtc]?frac\s*(?:\{{\s*(-?{_DIGITS})\s*\}}|(\d))\s*(?:\{{\s*(-?{_DIGITS})\s*\}}|(\d))|({_DIGITS})\s*/\s*({_DIGITS}))"
)
_NUMBER = re.compile(rf"{_FRACTION.pattern}|{_DIGITS}(?:{_TIMES_TEN.pattern})?")

# Context of a number.
_EQUALS = re.compile(r"=|\u2248|\\approx(?![a-z])")
_LEFT_SIDE = re.compile(  # of "=": a name (with optional arguments), arithmetic, or words
    r"\s*(?:(?P<name>\\?[^\W\d_]+(?:_\{?\w+\}?)?(?:\s*\([^()]*\))?)|[\d\s.,+\-*/()^{}]*|[^\W\d_]+(?:\s+[^\W\d_]+)*)\s*"
)
_FORMULA = re.compile(r"(?=.*(?:[\w)}\]]\s*[+*/^-]|[\\|(]))[^,;<>]*")  # left side of an answer's "="
_SEVERAL = re.compile(
    r"\\(?:vee|lor|wedge|land|cup|pm|mp|ne|neq|le|leq|lt|ge|geq|gt)(?![a-z])|[\u00b1\u2228\u2264\u2265]"
)
_WRAPPED = re.compile(r"\((.*)\)|\{(.*)\}|\\\{(.*)\\\}|\[(.*)\]")
# Text next to the last number that makes it an operand, or negative.
_OPERATION_BEFORE = re.compile(
    r"(?:[+*/^_\u00f7\u221a-]|\d[.,:]|[\w)\]}](?=[(\[{])|\}|\\(?!approx|therefore|implies|to\b|[LRlr]\w*arrow)[a-z]+)[\s(\[{]*$"
)
_OPERATION_BEHIND = re.compile(r"[\s)\]}]*(?:[+*/^_\u00f7]|\\(?:times|cdot|div|pi|neq?|leq?|geq?|lt|gt)\b)")
_OPERATION_OF = re.compile(  # in words before a number
    r"\b(?:half|double|triple|thrice|square|cube|factorial|reciprocal|inverse|opposite|third|quarter|tenth)"
    r"(?:\s+of)?(?:\s+the)?\s*$",
    re.IGNORECASE,
)
_SIGN = re.compile(r"(?:^|[=:(\[{,])\s*-\s*$|(?<![\d)\]}])\s-$")
_CJK = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_WORDS_BEFORE = re.compile(rf"(?:[^\W\d_]+[:,']?\s+|{_CJK}+[:,]?\s*)+")
_PERCENT = re.compile(r"\s*(?:%|(?:percent|per\s+cent|pct)\b)", re.IGNORECASE)
_UNIT = re.compile(
    rf"([\s(/\-]*)(?:per\s+)?({_CJK}|[%\u00b0]|(?:(?!{_CJK})[^\W\d_])+)(?:\s*\^\s*\{{?\s*-?\d\s*\}}?)?(.*)", re.DOTALL
)
_SHORT_UNITS = _words(
    "m s h g l w v j n k c f b km cm mm nm dm kg mg ml cl dl kw hz kj pa ms hr ft yd mi lb oz ha th st nd rd am pm kb "
    "mb gb tb rs z\u0142 kr is"
)
_TEENS = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_NUMERALS = {word: n for n, word in enumerate(_TEENS)} | {word: 20 + 10 * n for n, word in enumerate(_TENS)}
_SPELLED = re.compile(
    rf"(?:(?:{'|'.join(_TENS)})(?:[-\s](?:{'|'.join(_TEENS[1:10])}))?|(?:{'|'.join(_TEENS)}))\b"
    r"(?![-\s]+(?:quarters?|point)\b)",
    re.IGNORECASE,
)
_CHANGES = _words(  # words behind a number that make it another one
    "half halve third fourth fifth sixth seventh eighth ninth tenth hundredth thousandth millionth squared cubed "
    "factorial doubled tripled quadrupled halved"
)
CHANGED = re.compile(rf"\d[\s-]*(?:{'|'.join(_CHANGES)})s?\b", re.IGNORECASE)
_FUNCTIONS = _words(  # functions and constants in words
    "pi tau theta alpha beta gamma lambda phi sigma omega sqrt root cbrt sin cos tan cot sec csc log exp infty infinity"
)
_NO_UNITS = (
    _words("or and to plus minus times over mod choose if when where such not than base und oder et ou")
    | _FUNCTIONS
    | {*_NUMERALS}
)
_UNEQUAL = _words("not less more greater fewer least most under above below between than or and")
_OPERATIONS = _words("plus minus times mod modulo choose negative twice squared cubed root sqrt sin cos tan log ln exp")
_NUMBER_IN_WORDS_AFTER = re.compile(
    r"\b(?:for|in|after|of|on|at|by|with|from|per|every|each|within)\s+(?:the\s+)?\d[\d.,]*|\^\s*\{?\s*-?\d\s*\}?"
)
_MAGNITUDES = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    "lakh": 10**5,
    "crore": 10**7,
    "\u5343": 10**3,
    "\u4e07": 10**4,
    "\u4ebf": 10**8,
    "\u5104": 10**8,
    "\ub9cc": 10**4,
}


@dataclass(frozen=True)
class Quantity:
    """A number as it was written."""

    value: Fraction  # without the scale
    scale: Fraction = Fraction(1)  # 1/100 for percent, 1000 for "thousand", else 1
    num_places: int = 0  # decimal places
    name: str = ""  # left side of "=", or ""
    # False if an operation is left ("84/7", "1.5/2", "48 * 10^2"), but true for "1/3" and "4.8 * 10^3".
    is_finished: bool = True

    def equals(self, other: Quantity) -> bool:
        """Return whether both mean the same number.

        One side may omit "percent". A decimal of six or more places equals a number that it rounds.
        """
        if self.name and other.name and self.name != other.name:
            return False
        pairs = [(self.value * self.scale, other.value * other.scale)]
        if {self.scale, other.scale} == {1, _PER_CENT}:
            pairs.append((self.value, other.value))
        places = max(self.num_places, other.num_places)
        tolerance = Fraction(1, 10**places) if places >= _ROUNDED_FROM else 0
        return any(mine == theirs or abs(mine - theirs) < tolerance for mine, theirs in pairs)


def clean(text: str) -> str:
    """Return the text with ASCII digits and without fonts, spacing commands and currency signs."""
    if not text.isascii():
        text = _SUPERSCRIPTS.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
        text = _VULGAR_FRACTION.sub(lambda found: f" {unicodedata.normalize('NFKC', found[0])}", text)
        text = re.sub(r"\d", lambda found: str(unicodedata.digit(found[0])), text.translate(_CHARACTERS))
        text = "".join(character for character in text if unicodedata.category(character) != "Sc")
    text = text.replace("{,}", ",").replace(r"\!", "")
    text = _WRAPPED_TEXT.sub(r" \1 ", _DEGREES.sub(" degrees ", text))
    return _NOISE.sub("", _SPACES.sub(" ", text)).strip().rstrip(" .,;:\u3002\u3001")


def read_quantity(text: str, *, is_answer: bool = False) -> Quantity | None:
    """Parse the single number that a text means; return `None` if there is none.

    Args:
        text: an answer, with its unit, currency, name ("x = 5") or words.
        is_answer: the text comes from a response: "1,5" is one number, and of "2x + 1 = 5" only the 5 counts.
    """
    if len(text) > _LONGEST:
        return None
    *lefts, text = _EQUALS.split(_unwrap(re.sub(r"(?<=[^\W\d_]) \([^()]*\)$", "", clean(text))))
    side = _LEFT_SIDE.fullmatch(lefts[-1]) if lefts else None
    if lefts and not side:
        is_hedged = _UNEQUAL & {*lefts[-1].lower().split()} or _SEVERAL.search(lefts[-1])  # "5 or 6", "at least 5"
        if not is_answer or is_hedged or not _FORMULA.fullmatch(lefts[-1]):
            return None
    text = _unwrap(text.strip())
    if spelled := _SPELLED.match(text):
        text = f"{sum(_NUMERALS[word] for word in re.findall('[a-z]+', spelled[0].lower()))}{text[spelled.end() :]}"
    words = _WORDS_BEFORE.match(text)
    if words:
        before = words[0].lower().split()
        is_operand = (_UNEQUAL | _OPERATIONS) & set(before) or _OPERATION_OF.search(words[0])
        if is_operand or (len(before) == 1 and len(words[0].strip()) == 1):
            return None
        text = text[words.end() :]
    sign, text = (-1, text[1:].lstrip()) if text.startswith("-") else (1, text.removeprefix("+"))
    text = _CURRENCY_CODE.sub("", text, count=1)
    number, end = _read_number(text, decimal_comma=is_answer)
    scale = _read_rest(text[end:])
    if not number or not scale:
        return None
    name = re.sub(r"\s", "", side["name"] or "") if side else ""
    return replace(number, value=sign * number.value, scale=scale, name=name)


def read_last_quantity(text: str) -> Quantity | None:
    """Parse the last number of a response in prose; return `None` if it is part of an operation."""
    text = " ".join(clean(text[-_LONGEST_TEXT:]).split())
    last = [*_NUMBER.finditer(text)][-1:]
    if not last:
        return None
    before, text = text[: last[0].start()], text[last[0].start() :]
    sign = _SIGN.search(before)
    before = before[: sign.start()] if sign else before
    number, end = _read_number(text, decimal_comma=False)
    words = re.findall(r"[^\W\d_]+(?=\W*$)", before.lower())
    rest = text[end:]
    if not number or _OPERATION_BEFORE.search(before) or _OPERATION_BEHIND.match(rest) or _OPERATIONS & {*words}:
        return None
    scale, behind = _read_rest(rest) or (_PER_CENT if _PERCENT.match(rest) else None), _UNIT.match(rest)
    is_changed = not scale and behind and behind[2].lower().removesuffix("s") in _CHANGES | _FUNCTIONS | {*_MAGNITUDES}
    if is_changed or _OPERATION_OF.search(before):
        return None
    scale = scale or Fraction(1)
    return replace(number, value=-number.value if sign else number.value, scale=scale)


def _unwrap(text: str) -> str:
    """Remove brackets around the whole text, unless it has several numbers."""
    while wrapped := _WRAPPED.fullmatch(text):
        inside = next(part for part in wrapped.groups() if part is not None).strip()
        if "," in inside and not _PLAIN.fullmatch(inside):
            return text
        text = inside
    return text


def _read_number(text: str, decimal_comma: bool) -> tuple[Quantity | None, int]:
    match = _FRACTION.match(text)
    if match:
        whole, *parts = match.groups()
        top, bottom = (_to_fraction(part) for part in parts if part)
        if not bottom:
            return None, 0
        value, is_whole = top / bottom, top.denominator == bottom.denominator == 1
        is_finished = is_whole and value.denominator != 1 and (whole is None or 0 < value < 1)
        return Quantity(Fraction(whole or 0) + value, is_finished=is_finished), match.end()
    match = (_PLAIN_WITH_COMMA if decimal_comma else _PLAIN).match(text)
    if match is None:
        return None, 0
    value, places = _to_fraction(match[0]), len(re.split(r"[.,]", match[0])[-1]) if re.search("[.,]", match[0]) else 0
    power = _TIMES_TEN.match(text, match.end())
    if power is None:
        return Quantity(value, num_places=places), match.end()
    value *= Fraction(10) ** int(power[1] or power[2] or power[3])
    return Quantity(value, is_finished=bool(power[1]) or 1 <= _to_fraction(match[0]) < 10), power.end()


def _to_fraction(text: str) -> Fraction:
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text)
    grouped = re.sub(r"[ ']", "", text)
    if grouped != text and "," in grouped:
        grouped = grouped.replace(",", ".")  # 1 000,5
    elif re.fullmatch(r"\d{1,3}(\.\d{3})+,\d+|\d{1,3}(\.\d{3}){2,}", grouped):
        grouped = grouped.replace(".", "").replace(",", ".")
    elif re.fullmatch(r"\d+,\d+", grouped) and not re.fullmatch(r"\d{1,3},\d{3}", grouped):
        grouped = grouped.replace(",", ".")
    return sign * Fraction(grouped.replace(",", ""))


def _read_rest(rest: str) -> Fraction | None:
    """Return the scale given by the words after a number; `None` if they are more than a unit."""
    percent = _PERCENT.match(rest)
    if percent:
        return _PER_CENT if _is_unit(rest[percent.end() :]) else None
    unit = _UNIT.fullmatch(rest)
    word = unit[2].lower().removesuffix("s") if unit else ""
    if unit and word in _MAGNITUDES:
        return Fraction(_MAGNITUDES[word]) if _is_unit(unit[3]) else None
    return Fraction(1) if _is_unit(rest) else None


def _is_unit(rest: str) -> bool:
    rest = rest.strip(" .,;:)") if not rest.strip(" .,;:)") else rest
    unit = _UNIT.fullmatch(rest)
    if not rest or unit is None:
        return not rest
    gap, word, more = unit.groups()
    is_attached, is_foreign = not gap, not word.isascii()
    known = word.lower() in _SHORT_UNITS and (len(word) > 1 or not is_attached)
    if (
        word.lower() in _NO_UNITS
        or word.lower().removesuffix("s") in _CHANGES
        or not (known or is_foreign or len(word) >= (4 if is_attached else 3))
    ):
        return False
    more = _NUMBER_IN_WORDS_AFTER.sub("", re.sub(r"\([^()]*\)", "", more))
    more = re.sub(r"(?:\*|\\cdot)\s*(?=[^\W\d_])", "", more)  # kg * m
    return not re.search(rf"[\d=+*^\\{{}}<>]|\bthan\s+(?:{_SPELLED.pattern})", more)
