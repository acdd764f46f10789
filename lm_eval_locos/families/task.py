"""The harness task class of all our tasks.

A YAML file names it, the family's loader and the family's score:

    class: !function lm_eval_locos.families.task.LocosTask
    custom_dataset: !function lm_eval_locos.families.nolima.load
    process_results: !function lm_eval_locos.families.nolima.score
    test_split: test
    doc_to_text: prompt
    doc_to_target: answers
    num_fewshot: 0

`load(**kwargs)` returns `families.documents.package(...)`; ``score(doc, response)`` is pure and
receives the response as text. This class adds what every family needs: the mark of a bundled
sample, the data's provenance in the results file, a request cache that knows the documents, skipped
prompts, and the removal of thinking.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.task import ConfigurableTask

from lm_eval_locos.errors import SKIPPED, DataError, install_excepthook
from lm_eval_locos.families.documents import Documents
from lm_eval_locos.families.scoring import strip_thinking

install_excepthook()

BUNDLED_MARK = "[bundled sample]"
"""What the alias of a task on the bundled sample ends with, in the table and the results file."""

PROVENANCE_KEY = "locos_data"
"""The key in the task's metadata that holds the provenance in the results file's ``configs``."""


class LocosTask(ConfigurableTask):
    """A `ConfigurableTask` whose loader returns `Documents`."""

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str | None = None,
        download_mode: Any = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        # The harness leaves the YAML's own "class" key in, and TaskConfig knows no such field.
        config = {key: value for key, value in (config or {}).items() if key != "class"}
        shots = config.get("fewshot_config") or {}
        if callable(shots.get("samples")):
            # As a function they would stand in the results file by their address in memory.
            config["fewshot_config"] = {**shots, "samples": shots["samples"]()}
        super().__init__(data_dir, cache_dir, download_mode, config)
        if not isinstance(self.dataset, Documents):
            raise DataError(
                f"task {self.config.task}: custom_dataset returned {type(self.dataset).__name__}, "
                "expected Documents. Build it with lm_eval_locos.families.documents.package."
            )
        self.provenance = self.dataset.provenance
        metadata = {key: _plain(value) for key, value in (self.config.metadata or {}).items()}
        self.config.metadata = metadata | {PROVENANCE_KEY: self.provenance}
        if self.provenance["source"] == "bundled":
            self.config.task_alias = f"{self.config.task_alias or self.config.task} {BUNDLED_MARK}"

    def fewshot_docs(self) -> Any:
        """The examples that the YAML file gives, if any; documents are never used as examples."""
        return super().fewshot_docs() if self.fewshot_cfg.samples is not None else None

    def build_all_requests(self, *, tokenizer_name: str = "", **kwargs: Any) -> None:
        """Builds the requests; with --cache_requests the cache key carries the documents' hash.

        The harness's key knows the task's name but not its documents, so that other lengths or
        another source of data would meet stale prompts.
        """
        tokenizer_name = f"{tokenizer_name}-documents{self.provenance['sha256'][:16]}"
        super().build_all_requests(tokenizer_name=tokenizer_name, **kwargs)

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
        """The family's score of the response without its thinking; empty for a skipped prompt."""
        if not callable(self.config.process_results):  # --predict_only has put a name there
            return super().process_results(doc, results)
        response = results[0]
        if response == SKIPPED:
            return {}
        return self.config.process_results(doc, strip_thinking(response))


def _plain(value: Any) -> Any:
    """`value` where a results file can hold it; a model or tokenizer object by its name.

    The harness passes model_args on as metadata and copies metadata deeply: with
    ``model_args={"pretrained": model}`` that would copy the model.
    """
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return getattr(value, "name_or_path", None) or type(value).__name__
