# SPDX-License-Identifier: Apache-2.0
"""Records of steps and rollouts, where they go (metrics.jsonl, rollouts/, summary.json, TensorBoard), and every metric.

metrics.jsonl has one strict JSON object per step: `step` first, the other keys sorted, null for a non-finite number.
Each line is flushed, so a run that dies keeps every finished step.

`ROWS`, at the end, declares each metric once. docs/metrics.md, the console line, the charts of the status page, a panel
of curves.png and the metrics of each alarm are derived from it; a logged metric without a row fails the tests that read
a run.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import nsmallest
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.types import UserError

METRICS_FILE, ROLLOUTS, CONFIG_FILE, STOPPED_FILE = "metrics.jsonl", "rollouts", "config.yaml", "stopped.json"
VALIDATION = "validation"  # holds a folder of rollouts for each set
MOST_CHARACTERS = 4000  # of a shown text; rollouts/ has all of it
SAMPLE_FIELDS = ("label", "prompt", "response", "ground_truth", "reward", "reward_components", "finish_reason")
NumberRecord = Mapping[str, int | float]
Record = Mapping[str, float | None]  # as read back: null for non-finite numbers


class Sink:
    """Destination of a run's data; a sink overrides the methods whose data it can show."""

    def log(self, step: int, record: NumberRecord) -> None:
        """Take the record of one step: metric -> number, sorted; step 0 is before training."""

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Receive distributions of a step: arrays of values by name."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take some rollouts of a step, as rows of rollouts/step_<N>.jsonl."""

    def alarm(self, step: int, name: str, text: str) -> None:
        """Receive an alarm of `run.py`: the name of the failed check and a sentence that explains it."""

    def close(self) -> None:
        """Write buffered data; may be called again."""


class MetricsFile(Sink):
    """Sink that appends to metrics.jsonl in a run directory, which is created if missing."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, step: int, record: NumberRecord) -> None:
        """Write one line."""
        self._file.write(encode_record(step, record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def log_path(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return Path(run_dir) / "logs" / f"rank{rank}.log"


def plain_record(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    """Convert Python, numpy or torch scalars to Python numbers, sorted by name."""
    return {
        key: int(metrics[key]) if isinstance(metrics[key], numbers.Integral) else float(metrics[key])
        for key in sorted(metrics)
    }


def encode_record(step: int, metrics: NumberRecord) -> str:
    """Return one line of metrics.jsonl: `step`, then the sorted metrics; non-finite numbers become null."""
    if "step" in metrics:
        raise ValueError("'step' is not a metric")
    finite = {key: metrics[key] if math.isfinite(metrics[key]) else None for key in sorted(metrics)}
    return json.dumps({"step": step, **finite}, allow_nan=False)


def has_records(run_dir: Path) -> bool:
    """Return True if a run has written metrics to the directory."""
    path = Path(run_dir) / METRICS_FILE
    return path.exists() and path.stat().st_size > 0


def set_aside(run_dir: Path, after_step: int) -> Path | None:
    """Move records and rollouts of later steps, if any, to `attempt-<n>/` with a copy of the config; return that path.

    Earlier records keep their bytes; a last line that was cut off is deleted. An interrupted call can be repeated: no
    record is lost, but some may exist twice.

    Raises:
        UserError: a line is not JSON.
    """
    path, attempt = run_dir / METRICS_FILE, None
    records = read_metrics(run_dir) if path.exists() else []
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line] if path.exists() else []
    kept = sum(step_of(record) <= after_step for record in records)
    rollouts = [
        file for file in (run_dir / ROLLOUTS).glob("step_*.jsonl") if int(file.stem.removeprefix("step_")) > after_step
    ]
    if len(records) > kept or rollouts:
        attempt = next(found for n in count(1) if not (found := run_dir / f"attempt-{n}").exists())
        (attempt / ROLLOUTS).mkdir(parents=True)
        replace_text(attempt / METRICS_FILE, "".join(line + "\n" for line in lines[kept : len(records)]))
        if (run_dir / CONFIG_FILE).exists():
            shutil.copy(run_dir / CONFIG_FILE, attempt)
        for file in rollouts:
            file.rename(attempt / ROLLOUTS / file.name)
    if len(lines) > kept:
        replace_text(path, "".join(line + "\n" for line in lines[:kept]))
    return attempt


def step_of(record: Record) -> int:
    """Return the step of a record of `read_metrics`."""
    return int(record["step"] or 0)


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """Return the records of a run, without a last line that a crash cut off."""
    path, records = Path(run_dir) / METRICS_FILE, []
    if not path.exists():
        raise UserError(
            f"there is no {path}",
            source="run directory",
            expected="the directory of a run that has logged a step",
            hint="check the path",
        )
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            records += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            if number < len(lines):  # else no newline follows: the write was cut off
                raise UserError(
                    f"the line is no JSON: {error}",
                    source=f"{path}:{number}",
                    expected="one JSON object per line",
                    hint="remove the line",
                ) from error
    return records


def replace_text(path: Path, text: str, errors: str = "strict") -> None:
    """Replace a file atomically and durably; `errors` handles what UTF-8 cannot encode, as in `str.encode`."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", errors=errors) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class TensorBoard(Sink):
    """Sink that writes <run_dir>/tensorboard.

    Args:
        after_step: TensorBoard hides existing events after this step; `None` for a new run.
        samples_every: steps between two sets of sample texts; 0 for none.
    """

    def __init__(self, run_dir: Path, after_step: int | None = None, samples_every: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a slow import

        first = None if after_step is None else after_step + 1
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first)
        self._samples_every = samples_every

    def log(self, step: int, record: NumberRecord) -> None:
        """Write the scalars as one event, which takes a tenth of the time of `add_scalar` for each."""
        made: Any = import_module("tensorboard.compat.proto.summary_pb2")
        values = [made.Summary.Value(tag=key, simple_value=value) for key, value in record.items()]
        self._writer.file_writer.add_summary(made.Summary(value=values), step)
        self._writer.flush()

    def histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Write the distributions of finite values."""
        for name, found in values.items():
            finite = found[np.isfinite(found)]
            if len(finite):
                self._writer.add_histogram(name, finite, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the texts of rollouts in every `samples_every`-th step."""
        if is_due(step, self._samples_every):
            for number, row in enumerate(rows, 1):
                self._writer.add_text(f"samples/{number}", format_sample(row), step)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Write the alarm as a text of the step."""
        self._writer.add_text(f"health/{name}", text, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def is_due(step: int, every: int) -> bool:
    """Return True for step 1 and every n-th step, never if `every` is 0."""
    return every > 0 and (step == 1 or step % every == 0)


def format_sample(row: Mapping[str, Any]) -> str:
    """Return a rollout in Markdown, with texts indented so that Markdown and HTML in them have no effect."""
    parts = []
    for name in (name for name in SAMPLE_FIELDS if row.get(name) is not None):
        lines = re.split(r"\r\n|\r|\n", shorten(str(row[name])))
        parts += [name.replace("_", " "), "\n".join(f"    {line}" for line in lines)]
    return "\n\n".join(parts).encode("utf-8", "backslashreplace").decode()  # event files accept no lone surrogates


def shorten(text: str) -> str:
    """Return the first MOST_CHARACTERS of a text, and the number of omitted ones."""
    left_out = len(text) - MOST_CHARACTERS
    return text if left_out <= 0 else f"{text[:MOST_CHARACTERS]} [{left_out:,} more characters]"


SUMMARY_FILE = "summary.json"
NUM_BEST = 3  # responses of the last step
_BEGINNING, _END = 60, 100  # characters of a response on the console
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 8  # tokens of one character, which has at most four bytes


class TokenTexts:
    """Decoder of single tokens; the joined texts are the response (after sentencepiece's leading space).

    A character of several tokens belongs to the last of them.

    Args:
        decode: token ids -> text, without special tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}
        self._anchor: list[int] = []  # the token in front of every decoded one, once found
        self._anchor_text = ""

    def __call__(self, tokens: Sequence[int] | np.ndarray) -> list[str]:
        """Return the texts of tokens [s]."""
        texts: list[str] = []
        parts: list[int] = []
        for token in map(int, tokens) if not self._anchor else ():
            text = self._decode([token])
            if text.strip() and _BROKEN not in text:
                self._anchor, self._anchor_text = [token], text
                self._known.clear()
                break
        for token in map(int, tokens):
            if token not in self._known:  # behind another token: some tokenizers drop the leading space of a text
                self._known[token] = self._decode([*self._anchor, token])[len(self._anchor_text) :]
            text = self._known[token]
            if _BROKEN not in text:
                if parts:  # an unfinished character
                    texts[-1] = self._decode(parts)
                    parts = []
                texts.append(text)
                continue
            parts.append(token)
            joined = self._decode(parts)
            is_whole = _BROKEN not in joined or len(parts) == _MOST_PARTS
            texts.append(joined if is_whole else "")
            parts = [] if is_whole else parts
        if parts:
            texts[-1] = self._decode(parts)
        return texts


def token_fields(num_tokens: int, values: Mapping[str, np.ndarray]) -> dict[str, list[float | None]]:
    """Return per-token values as lists of one entry per response token, null for tokens without a value.

    Args:
        values: name -> [k] values of the last k tokens; NaN is no value. Names without any value are left out.
    """
    return {
        name: [None] * (num_tokens - len(column)) + as_numbers(column)
        for name, column in values.items()
        if np.isfinite(column).any()
    }


def as_numbers(values: np.ndarray, decimals: int = 6) -> list[float | None]:
    """Return rounded numbers for JSON, null for non-finite ones."""
    rounded = np.round(np.asarray(values, np.float64), decimals)
    if np.isfinite(rounded).all():
        return rounded.tolist()
    return [x if np.isfinite(x) else None for x in rounded.tolist()]


def write_rows(run_dir: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rollouts to `<run_dir>/rollouts/step_<N>.jsonl`, one JSON object per line."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (run_dir / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    # A lone surrogate, which an engine or a reward may return, becomes its JSON escape.
    replace_text(run_dir / ROLLOUTS / f"step_{step}.jsonl", "".join(lines), errors="backslashreplace")


def write_summary(run_dir: Path, extra: Mapping[str, Any] | None = None) -> Path:
    """Write summary.json from metrics.jsonl (UserError: unreadable) with extra JSON entries, and return its path."""
    path = Path(run_dir) / SUMMARY_FILE
    summary = {**summarize(read_metrics(run_dir)), **(extra or {})}
    replace_text(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return path


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """Summarize the records of a run.

    Returns:
        `steps` (training steps, so without step 0), `seconds_total` (sum of `time/step`, or of the phases of a record
        without it), `seconds` and `tokens` by name, and `first`, `last`, `best` with their steps of `reward` and of
        `validation` by data set. Entries without data are null.
    """
    sums: dict[str, dict[str, float]] = {"time": {}, "tokens": {}}
    keys = sorted({key for record in records for key in record})
    for key in keys:
        kind, _, name = key.partition("/")
        if kind in sums and key != "tokens/per_second":
            sums[kind][name] = sum(record.get(key) or 0 for record in records)
    return {
        "steps": max((step_of(record) for record in records), default=0),
        "seconds_total": sum(
            sum(phase_seconds(record).values()) if (whole := record.get("time/step")) is None else whole
            for record in records
        ),
        "seconds": sums["time"],
        "tokens": sums["tokens"],
        "reward": _course(records, "reward/mean"),
        "validation": {name: _course(records, key) for key in keys if (name := accuracy_set(key))},
    }


def find_best_responses(run_dir: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return a run's last step and its `NUM_BEST` best rows, the best first; of equals, different prompts first."""
    step = max(map(step_of, read_metrics(run_dir)), default=0)
    path = Path(run_dir) / ROLLOUTS / f"step_{step}.jsonl"
    if not path.exists():
        return step, []
    with path.open(encoding="utf-8") as file:
        return step, nsmallest(NUM_BEST, map(json.loads, file), key=lambda row: (-row["reward"], row["sample_index"]))


def format_response(row: Mapping[str, Any]) -> str:
    """Return a row of `find_best_responses` as one line, with escapes and without the middle of a long response."""
    response, truth = repr(row["response"]), row["ground_truth"]
    shown = f", ground truth {repr(truth)[:_BEGINNING]}" if truth else ""
    if len(response) > _BEGINNING + _END:
        response = f"{response[:_BEGINNING]} ... {response[-_END:]}"
    return f"reward {row['reward']:.4g}{shown}, response {response}"


def phase_seconds(record: Record) -> dict[str, float]:
    """Return the seconds of a record by phase, without the time of the whole step."""
    times = ((key.removeprefix("time/"), value) for key, value in record.items() if key.startswith("time/"))
    return {name: value for name, value in times if name != "step" and value is not None}


def _course(records: Sequence[Record], key: str) -> dict[str, float | int | None]:
    """Return the first, last and best value (largest, the earliest of equals) of a metric, with their steps."""
    points = [(step_of(record), value) for record in records if (value := record.get(key)) is not None]
    if not points:
        return dict.fromkeys(("first", "first_step", "last", "last_step", "best", "best_step"))
    best = max(points, key=lambda point: point[1])
    course = {}
    for name, (step, value) in (("first", points[0]), ("last", points[-1]), ("best", best)):
        course |= {name: value, f"{name}_step": step}
    return course


@dataclass(frozen=True)
class Metric:
    """Declaration of a metric, or of all metrics whose names have one pattern."""

    name: str  # key in a record; `<word>` stands for any text
    meaning: str  # text of docs/metrics.md
    unit: str = ""
    first_only: bool = False  # a step with several values (one per optimizer step) logs the first, not their mean
    console: str = ""  # format of the console column, with the words of the pattern as fields, in the table's order
    chart: str = ""  # title of a chart of `status.py`
    curve: str = ""  # legend in the panel "KL and rollout mismatch" of curves.png
    alarm: str = ""  # check of `run.py` that watches the metric

    def match(self, key: str) -> re.Match[str] | None:
        """Match a key of a record with `name`; the named groups contain the texts for its `<word>` placeholders."""
        return re.fullmatch(re.sub("<(\\w+)>", r"(?P<\1>.+)", re.escape(self.name)), key)


# fmt: off
ROWS: tuple[Metric, ...] = (
    Metric("reward/mean", "mean over the rollouts of the step, without those whose episode or reward service failed",
           console="reward {:.4f}", chart="reward"),
    Metric("reward/std", "standard deviation over the same rollouts"),
    Metric("reward/min", "lowest reward"),
    Metric("reward/max", "highest reward"),
    Metric("reward/<data_source>/mean", "mean reward of each data source, if a step has several"),
    Metric("reward/weight/<source>", "weight of a reward source that follows a schedule"),
    Metric("reward/<component>", "mean of a component: a source (after its thresholds), or a key that a reward "
           "function returns", console="{component} {:.4g}", chart="reward components", alarm="components"),
    Metric("reward/overlong", "mean of the soft overlong penalty", console="overlong {:.4g}",
           chart="reward components", alarm="components"),
    Metric("reward/unmarked_answers", "responses that mark no answer", "share"),
    Metric("reward/math_timeouts", "responses whose answer took too long to read", "share"),
    Metric("reward/math_unparsable_truth", "responses whose ground truth could only be compared as text", "share"),
    Metric("reward/service_failures", "responses on which a reward service failed", "share", alarm="failures"),
    Metric("reward/restates_prompt", "responses with a reward above 0 that repeat a part of the prompt", "share",
           alarm="restating"),
    Metric("reward/uninformative_groups", "groups whose rewards are all the same", "share",
           chart="truncated responses, groups without signal", alarm="no-signal"),
    Metric("sources/<source>/prompts", "prompts of a source of data.sources", "prompts"),
    Metric("sources/<source>/reward", "reward/mean of a source", console="{source} {:.3f}", chart="reward by source"),
    Metric("sources/<source>/reward/<component>", "a reward metric of a source's rollouts"),
    Metric("sources/<source>/response_tokens", "mean response tokens of a source", "tokens"),
    Metric("sources/<source>/truncated", "response/truncated of a source", "share"),
    Metric("sources/<source>/failed", "episodes of a source that failed", "share"),
    Metric("response/truncated", "responses cut at data.max_response_length", "share",
           chart="truncated responses, groups without signal", alarm="truncated"),
    Metric("response/length_mean", "mean length of a response; of an episode, all its branches", "tokens"),
    Metric("response/length_min", "shortest response", "tokens"),
    Metric("response/length_max", "longest response", "tokens"),
    Metric("prompt/length_mean", "mean length of a rollout's prompt", "tokens"),
    Metric("prompt/length_min", "shortest prompt", "tokens"),
    Metric("prompt/length_max", "longest prompt", "tokens"),
    Metric("tokens/prompt", "prompt tokens of all rollouts of the step", "tokens"),
    Metric("tokens/response", "response tokens of all rollouts of the step", "tokens", chart="tokens of all responses",
           alarm="length"),
    Metric("rollout/prefix_cache_hits", "tokens of requests found in the engines' prefix caches", "share"),
    Metric("rollout/draft_acceptance", "drafted tokens that the policy accepted (rollout.draft_tokens)", "share"),
    Metric("engines/members", "engines outside the job that serve (schedule.elastic)", "engines", alarm="engines"),
    Metric("engines/lost", "engines lost since the job started", "engines"),
    Metric("engines/seconds_to_rejoin", "from the last loss that was made good until its replacement served", "s"),
    Metric("rollout/cache_max", "largest use of the KV cache, mean over engines (vllm)", "share"),
    Metric("rollout/waiting_max", "most requests that wait in an engine, mean over engines (vllm)", "requests"),
    Metric("sampling/rounds", "generation rounds of algorithm.dynamic_sampling", "rounds"),
    Metric("sampling/generated_groups", "groups of all rounds", "groups"),
    Metric("sampling/informative_groups", "generated groups with different rewards", "groups"),
    Metric("sampling/filled_groups", "uninformative groups used to fill the batch", "groups"),
    Metric("sampling/dropped_groups", "informative groups beyond the batch", "groups"),
    Metric("curriculum/passed_over", "prompts that data.curriculum passed over while it drew batches", "prompts"),
    Metric("curriculum/unseen", "drawn prompts without an outcome so far", "prompts"),
    Metric("curriculum/filled", "drawn prompts that had been passed over: nothing else was left", "prompts"),
    Metric("curriculum/pass_rate", "mean pass rate of the prompts that were seen", "share"),
    Metric("curriculum/level", "mean level of the data sources (data.curriculum.kind=levels)", "level"),
    Metric("sampling/kept_mean", "mean size of the set from which a token was drawn (rollout.top_p, top_k, min_p)",
           "tokens"),
    Metric("sampling/kept_max", "largest such set", "tokens"),
    Metric("sampling/kept_at_limit", "tokens whose set has rollout.max_kept_tokens members", "share"),
    Metric("sampling/thoughts_ended", "responses whose thought rollout.thinking_budget ended", "share"),
    Metric("validation/<set>/accuracy", "mean reward: the share of right answers under a rule, else the mean score",
           console="val {set} {:.4f}", chart="validation accuracy"),
    Metric("validation/<set>/mean@<k>", "mean over rollout.validation_n = k responses to each prompt"),
    Metric("validation/<set>/pass@<k>", "prompts with a correct response (reward 0.5 or more) among k", "share"),
    Metric("validation/<set>/best@<k>", "mean of the best of k responses"),
    Metric("validation/<set>/failed", "episodes that failed and count as 0", "share"),
    Metric("validation/<set>/maj@<k>", "mean reward of the most frequent answer of k responses"),
    Metric("sft/loss", "next-token loss", "nats", console="loss {:.4f}", chart="loss"),
    Metric("preference/loss", "mean loss of the examples", console="loss {:.4f}", chart="loss"),
    Metric("preference/accuracy", "pairs whose chosen response has the higher reward; process: right steps", "share",
           chart="validation accuracy"),
    Metric("preference/margin", "reward of the chosen response minus that of the rejected one"),
    Metric("preference/chosen_reward", "mean reward of chosen responses: beta times their log-ratio, or the score"),
    Metric("preference/rejected_reward", "mean reward of rejected responses"),
    Metric("preference/nll", "mean negative log-prob of the chosen responses' tokens", "nats"),
    Metric("validation/<set>/margin", "preference/margin on a set"),
    Metric("validation/<set>/calibration_error", "gap of sigmoid(margin) to the share of right predictions", "share"),
    Metric("kl/mean", "KL to the reference per token, in the update", "nats", console="kl {:.2e}",
           chart="KL to the reference", curve="KL to reference"),
    Metric("kl/per_response", "KL to the reference per response, before the update", "nats"),
    Metric("kl/coef", "KL coefficient in use"),
    Metric("distill/kl", "log-prob of the policy minus that of the teachers per token, before the update; the "
           "divergence in the update if algorithm.distillation.kind is full or top_k", "nats"),
    Metric("distill/<teacher>", "distill/kl to one of several teachers, on its own tokens", "nats"),
    *(Metric(f"{name}/{part}", f"{words} {what} of a token in the loss")
      for name, what in (("advantages", "advantage"), ("returns", "return"), ("values", "critic's value"))
      for part, words in (("mean", "mean"), ("std", "standard deviation of the"), ("min", "lowest"),
                          ("max", "highest"))),
    Metric("policy/loss", "mean loss of the optimizer steps"),
    Metric("policy/clip_fraction", "tokens whose loss is clipped", "share", console="clip {:.4f}",
           chart="clipped tokens", alarm="clipping"),
    Metric("policy/clip_fraction_low", "those whose log-prob fell", "share"),
    Metric("policy/clip_fraction_high", "those whose log-prob rose", "share"),
    Metric("policy/grad_norm", "norm of the whole gradient before clipping", console="grad {:.3g}",
           chart="gradient norm", alarm="gradient"),
    Metric("policy/lr", "learning rate", chart="learning rate"),
    Metric("policy/entropy", "entropy of the next-token distribution", "nats", chart="entropy", alarm="entropy"),
    Metric("policy/ratio_max_deviation",
           "largest log-prob change before the first optimizer step; 0 if all passes agree", "nats", first_only=True),
    Metric("lora/norm", "norm of the products s B A of all adapters: their distance from the base model"),
    Metric("value/loss", "mean loss of the critic's optimizer steps"),
    Metric("value/grad_norm", "norm of the whole gradient of the critic before clipping", chart="gradient norm"),
    Metric("value/lr", "learning rate of the critic"),
    Metric("value/clip_fraction", "tokens whose gradient critic.value_clip removes", "share"),
    Metric("value/explained_variance", "explained variance of the returns; 1 is perfect, 0 no better than a constant",
           chart="explained variance", alarm="critic"),
    Metric("mismatch/mean", "mean log-prob gap between engine and trainer on the same tokens and weights", "nats",
           chart="engine against trainer", curve="mismatch, mean", alarm="mismatch"),
    Metric("mismatch/max", "largest log-prob gap", "nats", console="mismatch {:.1e}", curve="mismatch, max"),
    Metric("mismatch/k3", "KL estimate of the gap", "nats"),
    Metric("mismatch/effective_sample_size", "effective sample size of the importance weights; 1 without a gap",
           "share", alarm="sample-size"),
    Metric("mismatch/mean_weight", "mean weight of algorithm.importance_sampling before normalization"),
    Metric("mismatch/truncated_fraction", "tokens whose weight was truncated", "share"),
    Metric("mismatch/masked_fraction", "tokens whose weight was masked", "share"),
    Metric("mismatch/rejected_fraction", "responses rejected by algorithm.reject_sequence_above", "share"),
    Metric("mismatch/lag<steps>", "mean gap of tokens sampled by weights of this age; lag0 is numerical error", "nats",
           chart="engine against trainer", alarm="mismatch"),
    Metric("loss/<name>/<metric>", "metric of a policy loss: mean over the tokens in the loss"),
    Metric("estimator/<name>/<metric>", "metric of an advantage estimator"),
    Metric("aggregation/<name>/<metric>", "metric of a loss aggregation"),
    Metric("schedule/staleness_mean", "mean age of the weights that began a response", "steps", chart="staleness"),
    Metric("schedule/staleness_max", "largest age of such weights; at most schedule.max_staleness", "steps",
           chart="staleness"),
    Metric("schedule/carried", "responses begun ahead of their step, after the rollout", "responses"),
    Metric("schedule/carried_tokens", "tokens of the carried responses so far", "tokens"),
    Metric("schedule/engine_busy", "part of the rollout in which an engine has requests, mean over engines", "share",
           chart="busy engines"),
    Metric("agents/turns", "mean replies of an episode", "replies"),
    Metric("agents/forks", "mean branches of an episode beyond its first (`agents.history: template`)", "branches"),
    Metric("agents/tokens_sampled", "tokens sampled by the policy", "tokens"),
    Metric("agents/tokens_observed", "other tokens after the prompts", "tokens"),
    Metric("agents/max_turns", "episodes cut at `agents.max_turns`", "share"),
    Metric("agents/failed", "generated episodes that failed: timeouts and errors", "share", alarm="failures"),
    Metric("agents/timeouts", "episodes whose environment exceeded its time", "episodes"),
    Metric("agents/errors", "episodes whose environment raised or exited", "episodes"),
    Metric("agents/environment_seconds", "mean time of an episode in `reset` and `step`", "s"),
    Metric("agents/wait_share", "part of the rollout in which engines wait for environments", "share"),
    Metric("moe/max_load", "load of the busiest expert of all layers, relative to an even load",
           chart="load of the busiest expert"),
    Metric("moe/mean_load", "load of the busiest expert of each layer, mean over layers"),
    Metric("moe/dead_experts", "experts without a token in the loss, over all layers", "experts", chart="dead experts",
           alarm="dead-experts"),
    Metric("moe/entropy", "entropy of the gates relative to even gates", chart="entropy of routers"),
    Metric("moe/agreement", "replayed choices that the layer's router would have made as well", "share"),
    Metric("moe/bias_norm", "norm of all router biases after the update"),
    Metric("moe/flipped_tokens", "replayed tokens for which the router of some layer would have chosen other experts",
           "share"),
    Metric("moe/replayed_stale", "replayed tokens whose experts were chosen by weights of an earlier step", "share"),
    Metric("moe/max_load/<third>", "moe/max_load of the first, middle or last third of the layers with experts",
           chart="load of the busiest expert"),
    Metric("moe/dead_experts/<third>", "moe/dead_experts of a third", "experts", chart="dead experts"),
    Metric("moe/entropy/<third>", "moe/entropy of a third", chart="entropy of routers"),
    Metric("moe/<metric>/<third>", "mean_load, agreement and bias_norm of a third"),
    Metric("mtp/loss", "negative log-likelihood of the token after the next, by the MTP layer"),
    Metric("mtp/acceptance", "mean of min(1, q / p) over sampled tokens, with q of the MTP layer and p of the engine: "
           "acceptance rate of its drafts in speculative decoding", "share"),
    Metric("mtp/grad_norm", "gradient norm of the MTP layer before clipping"),
    Metric("ledger/<term>/numerator", "numerator of a term of the loss: policy, kl, entropy, value"),
    Metric("ledger/<term>/denominator", "denominator of the term; 1 if a plugin aggregates"),
    Metric("packing/efficiency", "real tokens over computed tokens", "share"),
    Metric("packing/padded_efficiency", "packing/efficiency if every sequence were padded to the longest", "share"),
    Metric("packing/budget_use", "real tokens over micro-batches times max_tokens_per_microbatch", "share"),
    Metric("packing/imbalance", "cost of the heaviest data-parallel rank over the mean"),
    Metric("packing/prompt_repeats", "computed prompt tokens over unique ones (shared prompts)"),
    Metric("packing/prefix_repeats", "computed tokens over unique ones (`actor.share_prompts: tree`)"),
    Metric("packing/padding_share", "padding in the buckets (step_mode static and graph)", "share"),
    Metric("packing/padding_share_<bucket>", "padding in one bucket", "share"),
    Metric("samples/bytes_per_rank",
           "headers, tokens and columns received by the rank that received most, without rows of the rollout log",
           "bytes"),
    Metric("reshard/bytes_moved", "moved between ranks per switch", "bytes"),
    Metric("reshard/bytes_copied", "copied inside ranks per switch", "bytes"),
    Metric("reshard/bytes_aliased", "shared by trainer and engine", "bytes"),
    Metric("reshard/verified_tensors", "tensors covered by the last certificate", "tensors"),
    Metric("time/step", "the whole step", "s"),
    Metric("tokens/per_second", "tokens/prompt and tokens/response over time/step", "tokens/s", console="tok/s {:,.0f}",
           chart="tokens per second"),
    Metric("throughput/step", "tokens/per_second per GPU (a rank, on a CPU)", "tokens/s"),
    Metric("throughput/update", "prompt and response tokens in time/update per GPU of the actor", "tokens/s"),
    Metric("throughput/rollout", "response tokens in time/rollout per GPU of the engines", "tokens/s"),
    *(Metric(f"mfu/{phase}", f"operations of {what} over the peak of the GPUs; absent on others", "share")
      for phase, what in (("step", "rollout, log-probs and update"), ("update", "the update"),
                          ("rollout", "one pass over all tokens"))),
    Metric("time/reshard", "transfer of weights to the engines", "s"),
    Metric("time/verify", "certificate of the transfer", "s"),
    Metric("time/rollout", "generation", "s"),
    Metric("time/reward", "scoring after generation", "s"),
    Metric("time/old_logprobs",
           "log-probs of the policy before the update; absent if the first pass of the update gives them", "s"),
    Metric("time/ref_logprobs", "log-probs of the reference", "s"),
    Metric("time/teachers", "log-probs or distributions of the teachers", "s"),
    Metric("time/values", "values of the critic", "s"),
    Metric("time/update", "optimizer steps of the policy", "s"),
    Metric("time/update_critic", "optimizer steps of the critic", "s"),
    Metric("time/validation", "generation and scoring of the validation sets", "s"),
    Metric("time/save", "time for which training waits for checkpoints", "s"),
    Metric("time/capture", "trainer.capture_step", "s"),
    Metric("memory/<phase>", "at the end of a phase: peak of the device on CUDA, resident memory on a CPU", "bytes"),
)
# fmt: on


@cache
def find_metric(key: str) -> Metric | None:
    """Return the declaration of a record's key, with the fewest placeholders if several match; `None` if none does."""
    found = [metric for metric in ROWS if metric.match(key) is not None]
    return min(found, key=lambda metric: metric.name.count("<"), default=None)


def format_columns(record: Mapping[str, float]) -> dict[str, str]:
    """Format the metrics of a record that have a console column, by key in the table's order."""
    return {
        key: metric.console.format(value, **found.groupdict())
        for metric in ROWS
        if metric.console
        for key, value in record.items()
        if find_metric(key) is metric and (found := metric.match(key))
    }


def accuracy_set(key: str) -> str | None:
    """Return <set>, the validation set's name, of a key `validation/<set>/accuracy`; `None` for any other key."""
    found = re.fullmatch("validation/(.+)/accuracy", key)
    return None if found is None else found[1]
