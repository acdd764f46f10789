"""The calibrations of a harness model: which prompts, measured when they are first needed.

    >>> calibration, source = lm.calibrations.get("nolima", templated=True)
    >>> source["families"], source["means_sha256"]

Requests of a family are ablated with means over prompts of that family, as the model sees them:
with the chat template where the requests have it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from lm_eval_locos.cache import cached
from lm_eval_locos.calibration import MAX_TOKENS, Average, Calibration, calibrate, read_prompts
from lm_eval_locos.families import FAMILIES, calibration_prompts

if TYPE_CHECKING:
    from lm_eval_locos.model import LocosAblatedLM

_log = logging.getLogger(__name__)


class Calibrations:
    """Measured calibrations and where they come from.

    Attributes:
        source: ``auto`` (each task's own family), a family's name, or a file of prompts.
        count: how many prompts.
        average: see `calibrate`.
        measured: by family (None: of all families, or of the given source) and whether the prompts
            went through the chat template.
    """

    def __init__(self, lm: LocosAblatedLM, source: str, count: int, average: Average) -> None:
        self._lm = lm
        self.source, self.count, self.average = source, count, average
        self.measured: dict[tuple[str | None, bool], tuple[Calibration, dict[str, Any]]] = {}

    @property
    def _from_file(self) -> bool:
        return self.source != "auto" and self.source not in FAMILIES

    def get(self, family: str | None, templated: bool) -> tuple[Calibration, dict[str, Any]]:
        """The calibration for a family's requests, and its provenance.

        Raises:
            DataError: a file without prompts, or prompts that the evaluation asks.
        """
        key = (family if self.source == "auto" else None, templated)
        if key not in self.measured:
            self.measured[key] = self._measured(*key)
        return self.measured[key]

    def _measured(self, family: str | None, templated: bool) -> tuple[Calibration, dict[str, Any]]:
        lm = self._lm
        prompts, source = self._prompts(family, templated)
        limit = min(MAX_TOKENS, lm.max_length)
        token_ids = [lm.tok_encode(prompt)[:limit] for prompt in prompts]
        token_hash = hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()
        identity = {
            "model": lm.identity,
            "tokens": token_hash,
            "site": lm.site,
            "average": self.average,
            "seed": lm.seed,
        }

        def measure() -> Calibration:
            return calibrate(
                lm.model,
                token_ids,
                site=lm.site,
                average=self.average,
                batch_size=lm.batch_size if isinstance(lm.batch_size, int) else 1,
                seed=lm.seed,
                architecture=lm.architecture,
                progress=lm.rank == 0,
            )

        # Ranks measure together: one that found a file would leave the others waiting.
        alone = lm.architecture.ranks == 1
        calibration = cached(identity, measure) if alone else measure()
        return calibration, source | {
            "prompts": calibration.num_prompts,
            "tokens": calibration.num_tokens,
            "tokens_sha256": token_hash,
            "means_sha256": calibration.sha256,
        }

    def _prompts(self, family: str | None, templated: bool) -> tuple[list[str], dict[str, Any]]:
        """Calibration prompts as the model sees them, and their provenance."""
        lm, wanted = self._lm, self.count
        if self._from_file:
            prompts = read_prompts(self.source)[:wanted]
            if len(prompts) < wanted:
                _log.warning("%s has %d prompts; %d were asked", self.source, len(prompts), wanted)
            return prompts, {"file": self.source}
        names = [self.source] if self.source != "auto" else [family] if family else list(FAMILIES)
        turns: list[str] = []
        parts = {}
        for i, name in enumerate(names):
            share = wanted // len(names) + (i < wanted % len(names))
            if share:
                found, parts[name] = calibration_prompts(
                    name, tokenizer=lm.tokenizer, count=share, seed=lm.seed
                )
                turns += found
        if templated:
            turns = [lm.apply_chat_template([{"role": "user", "content": t}]) for t in turns]
        return turns, {"families": parts, "chat_template": templated}

    def provenance(self) -> dict[str, dict[str, Any]]:
        """What a results file says of what was measured, by family."""
        other = "all families" if self.source == "auto" else "given"
        return {family or other: source for (family, _), (_, source) in self.measured.items()}

    def identity(self) -> dict[str, Any]:
        """What answers depend on."""
        source = self.source
        if self._from_file:
            source = hashlib.sha256("\n".join(read_prompts(source)).encode()).hexdigest()
        return {"calibration": source, "num_calibration": self.count, "average": self.average}
