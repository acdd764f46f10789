"""What a loaded model's attention looks like: the one description that everything else reads.

    >>> architecture = describe(model)
    >>> architecture.num_layers, architecture.num_heads, architecture.slices("query").size
    (30, 9, 64)
    >>> architecture.layers[3].query      # the module whose output holds the queries
    Linear(in_features=576, out_features=576, bias=False)

`lm_eval_locos.architecture.families` lists the families that are known, and `register_family`
describes another one.
"""

from lm_eval_locos.architecture._describe import (
    attention_implementation,
    base_model,
    describe,
    input_device,
    plain_weight,
)
from lm_eval_locos.architecture._structure import (
    SITES,
    Architecture,
    AttentionLayer,
    Head,
    HeadSlices,
    Kind,
    Site,
)
from lm_eval_locos.architecture.families import Family, known_model_types, register_family

__all__ = [
    "SITES",
    "Architecture",
    "AttentionLayer",
    "Family",
    "Head",
    "HeadSlices",
    "Kind",
    "Site",
    "attention_implementation",
    "base_model",
    "describe",
    "input_device",
    "known_model_types",
    "plain_weight",
    "register_family",
]
