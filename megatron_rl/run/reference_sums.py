# SPDX-License-Identifier: Apache-2.0
"""Log-probs of responses under the reference, computed before training: the file `preference.reference_logprobs`.

The file is an .npz archive with one sum per response, found by a digest of its tokens, and with digests of the
reference's weights and of the tokenizer. Rank 0 reads and writes it; the other ranks receive its content.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from megatron_rl.checkpoint.files import sync, write_file
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.preference_rows import Preference, PreferenceSet
from megatron_rl.parallel.collectives import failing_together, share_object, world
from megatron_rl.run.opening import Dependencies
from megatron_rl.run.preference_inputs import PreferenceInputs
from megatron_rl.types import UserError


class ReferenceSums:
    """Sums of the reference's log-probs of responses.

    Attributes:
        keys: [n] uint64 digests of prompt and response, ascending.
        sums: [n] float64.
    """

    def __init__(self, keys: np.ndarray, sums: np.ndarray) -> None:
        self.keys, places = np.unique(keys, return_index=True)  # of equal responses, the first
        self.sums = sums[places]

    def find(self, examples: Iterable[Preference]) -> np.ndarray:
        """Return the sum of each response, [k] float64; NaN if it is missing."""
        wanted = digest_responses(examples)
        places = np.searchsorted(self.keys, wanted).clip(max=len(self.keys) - 1)
        return np.where(self.keys[places] == wanted, self.sums[places], np.nan)

    def write(self, path: Path, about: dict[str, str]) -> None:
        """Write the file on rank 0, whole or not at all (UserError on every rank if it cannot be); collective."""
        content, partial = io.BytesIO(), path.with_name(f"{path.name}.{os.getpid()}.partial")
        with failing_together(world(), lambda error: _refuse(path, f"cannot be written: {error.strerror}")):
            if world().rank() == 0:
                np.savez(content, keys=self.keys, sums=self.sums, about=json.dumps(about))
                write_file(partial, content.getvalue())
                os.replace(partial, path)
                sync(path.parent)


def digest_responses(examples: Iterable[Preference]) -> np.ndarray:
    """Return a digest of the prompt's and the response's tokens, [number of responses] uint64."""
    digests = (
        blake2b(len(example.prompt.tokens).to_bytes(8) + response.branches[0].tokens.tobytes(), digest_size=8).digest()
        for example in examples
        for response in example.responses
    )
    return np.frombuffer(b"".join(digests), np.uint64)


def describe_reference(config: RunConfig, inputs: PreferenceInputs, dependencies: Dependencies) -> dict[str, str]:
    """Return what the reference's log-probs depend on besides the tokens of the rows: name -> digest or value."""
    vocabulary = json.dumps(sorted(inputs.tokenizer.read_vocabulary().items()))
    assert inputs.reference is not None, "or the setting would have been refused"
    return {
        "tokenizer": blake2b(vocabulary.encode(), digest_size=8).hexdigest(),
        "weights of the reference": dependencies["reference"]["digest"][:16],
        "model.dtype": config.model.dtype,
        "rollout.temperature": str(config.rollout.temperature),
        "actor.quantization": config.actor.quantization if inputs.reference.spec.shares else "none",
    }


def read_sums(path: Path, about: dict[str, str], inputs: PreferenceInputs) -> ReferenceSums | None:
    """Read the file on rank 0 for all ranks; `None` if there is none; collective.

    Raises:
        UserError: it cannot be read, or is of another reference, tokenizer or other rows; or there is none and its
            directory cannot be written.
    """
    found = None
    with failing_together(world(), lambda error: _refuse(path, f"cannot be read: {error.strerror}")):
        if world().rank() == 0 and path.exists():
            found = _read(path, about, [inputs.data, *inputs.validation.values()])
        elif world().rank() == 0 and not os.access(path.parent, os.W_OK):
            raise _refuse(path, "cannot be written: its directory is missing or read-only")
    return share_object(found, world())


def _read(path: Path, about: dict[str, str], parts: Sequence[PreferenceSet]) -> ReferenceSums:
    try:
        with np.load(path) as file:
            seen, found = json.loads(str(file["about"])), ReferenceSums(file["keys"], file["sums"])
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise _refuse(path, f"cannot be read: {error}") from None
    wrong = [f"{name} {seen.get(name)}, here {value}" for name, value in about.items() if seen.get(name) != value]
    if wrong:
        raise _refuse(path, f"was written with another reference or tokenizer: {'; '.join(wrong)}")
    examples = [example for part in parts for example in part.examples]
    unknown = np.flatnonzero(np.isnan(found.find(examples)))
    if len(unknown):
        first = [example.prompt.text for example in examples for _ in example.responses][unknown[0]]
        raise _refuse(path, f"lacks {len(unknown)} responses of the rows, the first to {first[-60:]!r}")
    return found


def _refuse(path: Path, found: str) -> UserError:
    return UserError(
        f"{path} {found}",
        source="preference.reference_logprobs",
        expected="the log-probs of this run's rows under its reference, or a new file",
        hint="name another file: the reference scores all rows before step 1 and writes it",
    )
