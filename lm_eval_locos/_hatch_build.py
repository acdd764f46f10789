"""hatchling hook: an editable install gets the start-up files, and no copy of tasks/."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

STARTUP = ("lm_eval_locos_autoload.pth", "lm_eval_locos_autoload.start")


class CustomBuildHook(BuildHookInterface):
    """Adds the start-up files beside the editable install's path file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["force_include_editable"] = {
            f"{self.root}/lm_eval_locos/{name}": name for name in STARTUP
        }
