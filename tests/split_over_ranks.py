"""What every rank of test_tensor_parallel.py runs: torchrun ... split_over_ranks.py FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from safetensors.torch import save_file
from tiny import padded, random_ids
from torch import distributed
from transformers import AutoModelForCausalLM

from lm_eval_locos.ablation import ablate
from lm_eval_locos.architecture import Architecture, Head, describe
from lm_eval_locos.calibration import calibrate, constants
from lm_eval_locos.errors import ModelError
from lm_eval_locos.model import LocosAblatedLM

HEADS = [Head(0, 0), Head(0, 3), Head(1, 2), Head(2, 1)]  # of both ranks
PROMPTS = random_ids(20, 3, 11, 8)
BATCH = padded(random_ids(20, 7, 13), "left")
SITES = ("query", "output")


def heads_of(architecture: Architecture) -> list[Head]:
    """HEADS, but for those of layers without attention."""
    return [head for head in HEADS if head.layer in architecture.layers]


def measured(model, prefix: str) -> dict[str, torch.Tensor]:
    """Means, samples and logits with `heads_of` at their means and samples, at both sites."""
    found = {}
    architecture = describe(model, tensor_parallel=True)
    heads = heads_of(architecture)
    for site in SITES:
        calibration = calibrate(model, PROMPTS, site=site, batch_size=2, progress=False)
        found[f"{prefix}/{site}/means"] = calibration.means
        found[f"{prefix}/{site}/samples"] = calibration.samples
        for mode in ("mean", "resample"):
            values = constants(calibration, heads, mode=mode, seed=1)
            with torch.inference_mode(), ablate(model, values, site=site) as ablation:
                found[f"{prefix}/{site}/{mode}"] = model(**BATCH).logits
            assert ablation.fired == len(architecture.layers)
    return found


def evaluated(folder: Path, **options) -> dict[str, object]:
    """What the harness model makes of a few requests, and what it is known by."""
    asked = ("w5 w6 w7 w8", "w9", "w11 w12 w13 w14 w15")
    kwargs = {"until": [], "max_gen_toks": 6, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (text, kwargs), 0, metadata=("task", i, 1))
        for i, text in enumerate(asked)
    ]
    likely = [Instance("loglikelihood", {}, ("w5 w6", " w7"), 0, metadata=("task", 0, 1))]
    model = LocosAblatedLM(
        pretrained=str(folder / "model-llama"),
        heads=str(folder / "heads.json"),
        num_heads=4,
        calibration=str(folder / "prompts.txt"),
        num_calibration=10,
        batch_size=2,
        **options,
    )
    return {
        "texts": model.generate_until(requests, True),
        "likelihood": model.loglikelihood(likely, True)[0][0],
        "identity": model.get_model_info()["locos"]["model_identity"],
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    tensors, facts = {}, {}
    for path in sorted(folder.glob("model-*")):
        name = path.name.removeprefix("model-")
        model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto").eval()
        facts[name] = of = {}
        try:
            describe(model)
        except ModelError as error:
            of["scoring"] = str(error)
        try:
            architecture = describe(model, tensor_parallel=True)
        except ModelError as error:
            of["error"] = str(error)
            continue
        of["ranks"] = architecture.ranks
        of |= {site: list(architecture.slices(site).here) for site in SITES}
        try:
            with torch.no_grad():
                model(**BATCH)  # by itself: nothing of ours is in it
        except (AttributeError, RuntimeError) as error:
            of["broken"] = f"transformers cannot split {name}: {error}"
            continue
        try:
            tensors |= measured(model, name)
        except ModelError as error:
            of["refused"] = str(error)
    rank = distributed.get_rank()
    facts["harness"] = evaluated(folder, tp_plan="auto")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{rank}")
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
