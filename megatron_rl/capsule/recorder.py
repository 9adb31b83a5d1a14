# SPDX-License-Identifier: Apache-2.0
"""Writes the capsule of a step while the run continues.

    <run_dir>/capsules/step_<N>/
        manifest.json        config, layouts, packages, batch plan, metrics; index of values.safetensors
        rollouts.jsonl       the scored rollouts
        values.safetensors   every number that is compared, see record.py
        SHA256SUMS           digests of these files and of the state's own SHA256SUMS
        state/step_<N-1>/    checkpoint from which the step started
    <run_dir>/capsules/step_<N>.partial/   being written; never read

The directory is renamed once complete. A failed write is logged and the run continues.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_rl.capsule.record import Section, StepObserver, encode_sections
from megatron_rl.capsule.rollouts import write_rollouts
from megatron_rl.checkpoint.files import DIGESTS_FILE, FileRecord, explain_write_error, write_file
from megatron_rl.checkpoint.manifest import begin_manifest, seal
from megatron_rl.checkpoint.pieces import SavedRole
from megatron_rl.config.batch_plan import BatchPlan
from megatron_rl.config.rendering import config_to_dict
from megatron_rl.config.schema import RunConfig
from megatron_rl.observability.run import Run
from megatron_rl.parallel.collectives import world
from megatron_rl.samples.experience import Experience
from megatron_rl.types import UserError

CAPSULE_KIND, ROLLOUTS_FILE, VALUES_FILE, STATE = "capsule", "rollouts.jsonl", "values.safetensors", "state"


class CapsuleRecorder:
    """A writer of the capsule of step `trainer.capture_step`; methods are collective.

    Args:
        roles: see `StepObserver`.
        save_state: writes the last step's end as a checkpoint into a directory; returns an error, if any.
        decode: response tokens -> text.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: BatchPlan,
        run: Run,
        roles: Mapping[str, SavedRole],
        save_state: Callable[[Path], UserError | None],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._config, self._plan, self._run, self._roles = config, plan, run, roles
        self._save_state, self._decode = save_state, decode
        self._observer: StepObserver | None = None

    def begin(self, step: int) -> None:
        """Save the state before the captured step."""
        if step != self._config.trainer.capture_step:
            return
        partial = self._partial(step)
        with self._run.timers.phase("capture", swallow=True):
            if self._run.is_writer:
                shutil.rmtree(partial, ignore_errors=True)
            error = self._save_state(partial / STATE)
            if error is not None:
                self._report_failure(step, error)
                return
            self._observer = StepObserver(self._roles, world())
            self._observer.begin()

    def end(self, step: int, samples: Experience) -> None:
        """Add the results of the captured step and publish the capsule."""
        if self._observer is None:
            return
        with self._run.timers.phase("capture", swallow=True):
            rollouts, sections = self._observer.end(samples, self._decode, self._run.series)
            self._observer = None
            if not self._run.is_writer:
                return
            partial = self._partial(step)
            try:
                records = [write_rollouts(partial / ROLLOUTS_FILE, rollouts, samples)]
                num_bytes = self._write(step, partial, records, sections)
                self._run.log.info("capsule: %s, %s bytes", partial.with_suffix(""), f"{num_bytes:,}")
            except (UserError, OSError) as error:
                self._report_failure(step, explain_write_error(error, partial))

    def _partial(self, step: int) -> Path:
        return self._run.dir / "capsules" / f"step_{step}.partial"

    def _report_failure(self, step: int, error: UserError) -> None:
        self._run.log.error("capsule of step %d failed, the run continues: %s", step, error)
        if self._run.is_writer:
            shutil.rmtree(self._partial(step), ignore_errors=True)

    def _write(self, step: int, partial: Path, records: list[FileRecord], sections: list[Section]) -> int:
        entries, arrays = encode_sections(sections)
        state = partial / STATE / f"step_{step - 1}"
        sums = (state / DIGESTS_FILE).read_bytes()
        records += [
            write_file(partial / VALUES_FILE, arrays),
            FileRecord(state / DIGESTS_FILE, len(sums), hashlib.sha256(sums).hexdigest()),
        ]
        num_bytes = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
        manifest = begin_manifest(CAPSULE_KIND, step) | {
            "state": f"{STATE}/step_{step - 1}",
            "world_size": self._plan.world_size,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "layouts": {name: role.model.layout.describe() for name, role in self._roles.items()},
            "config": config_to_dict(self._config),
            "plan": asdict(self._plan),
            "metrics": self._run.counted(),
            "sections": entries,
        }
        return num_bytes + seal(partial, manifest, records)
