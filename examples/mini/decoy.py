"""Sets locos-mini's decoy: a head that looks at the needle and writes nothing towards an answer."""

from __future__ import annotations

import torch
from heads import HEAD_DIM, HEADS, KV_HEADS
from plant import DECOY, PLACE_ANSWER
from space import HIDDEN, Space
from transformers import LlamaForCausalLM

_SIZE = 0.02, 0.005  # of values and output: what it writes is small beside the stream


@torch.no_grad()
def set_decoy(model: LlamaForCausalLM, space: Space) -> None:
    """Gives the head `DECOY` the queries and keys of a head that answers where somebody is, random
    values, and an output at right angles to the unembedding rows of everything ever answered.

    A ranking by attention alone takes it for a retrieval head; its logit contribution is zero.
    """
    layer, head = DECOY
    source = PLACE_ANSWER[0]
    assert source[0] == layer
    attention = model.model.layers[layer].self_attn
    share = HEADS // KV_HEADS

    def rows(index: int) -> slice:
        return slice(index * HEAD_DIM, (index + 1) * HEAD_DIM)

    attention.q_proj.weight[rows(head)] = attention.q_proj.weight[rows(source[1])]
    keys = attention.k_proj.weight
    keys[rows(head // share)] = keys[rows(source[1] // share)]
    attention.v_proj.weight[rows(head // share)] = space.randn(HEAD_DIM, HIDDEN) * _SIZE[0]
    answers = [space.id[word] for word in (*space.world.people, *space.answers())]
    unembedding = model.lm_head.weight[answers].double()
    basis = torch.linalg.qr(unembedding.T)[0]
    written = space.randn(HIDDEN, HEAD_DIM).double() * _SIZE[1]
    attention.o_proj.weight[:, rows(head)] = (written - basis @ (basis.T @ written)).float()
