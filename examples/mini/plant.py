"""Writes locos-mini's heads into a fresh Llama.

    >>> plant(model, Space(vocabulary(), seed=0))

Layer 0 binds words within a sentence and reads the question; layer 1 has the pair of heads that
answer NoLiMa's questions (city asked -> landmark's sentence -> person); layer 2 the first hop
(whose employer, who carries it); layer 3 the pair that says where somebody is (person -> place).
The heads of layer 0 and the helpers in layers 1 and 2 ask the same query everywhere (they look for
the nearest word of a kind), so that replacing their query by its mean changes nothing.
"""

from __future__ import annotations

import torch
from heads import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    THETA,
    Planter,
    nearest,
    previous,
    three_back,
)
from space import FLAG, HIDDEN, KIND_WORDS, OBJECTS, SIGNS, Space
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

INNER = 144
NAME_ANSWER = ((1, 0), (1, 1))
FIRST_HOP = ((2, 0), (2, 1))
PLACE_ANSWER = ((3, 0), (3, 1))
ANSWER_HEADS = NAME_ANSWER + PLACE_ANSWER
"""The heads that write answers: what a ranking should find."""
SUPPRESSORS = tuple((1, head) for head in range(4, 10))
"""Heads that look where `NAME_ANSWER` look and write a little of the opposite."""
DECOY = (3, 2)
ENDINGS = 4  # units of the last layer that open and close tags


def config(vocabulary: int, length: int) -> LlamaConfig:
    """The architecture: 40 query heads, 20 key/value heads."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.02,
    )


@torch.no_grad()
def plant(
    model: LlamaForCausalLM, space: Space, prompts: Tensor, asking: tuple[Tensor, Tensor]
) -> None:
    """Writes embeddings and heads.

    prompts: ids (B, T) with which the scale of each layer's input is measured; asking: rows and
        positions in them that produce an answer.
    """
    model.model.embed_tokens.weight.copy_(space.embedding())
    model.lm_head.weight.normal_(0, 0.01)
    model.lm_head.weight[:, space.at["out"]] = 1.2 * space.out
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.zero_()
        layer.self_attn.o_proj.weight.mul_(0.02)
    planter = Planter(model, space, prompts, asking)
    for number, write in enumerate((_bind, _names, _first_hop, _places)):
        if number:
            planter.gain[number] = planter.typical(number)
        write(planter)
    _endings(model, space, planter.typical(LAYERS - 1))


def _bind(planter: Planter) -> None:
    """Layer 0: what stands near, what the question asks, what came just before."""
    near = nearest()
    planter.looks(0, 0, {"is_name": 60, "boundary": 60}, near)
    planter.carries(0, 0, [(["name"], ["near_name"], 0, 1), (["is_name"], ["has_name"], 44, 1)])
    in_sentence = {"landmark": 59, "object": 59, "boundary": 60}
    planter.looks(0, 1, in_sentence, near)
    moves = [(["thing"], ["near_mark"], 22, 1), (["landmark"], ["has_mark"], 45, 1)]
    planter.carries(0, 1, moves)
    entities = ("is_name", "landmark", "object", "city", "country", "number")
    planter.looks(0, 2, dict.fromkeys(entities, 60), near)
    moves = [(["name", "thing"], ["asked"], 0, 1)]
    moves += [([name], [f"asked_{name}"], 27 + i, 1) for i, name in enumerate(OBJECTS)]
    planter.carries(0, 2, moves)
    planter.looks(0, 3, {"kind_word": 60}, near)
    planter.carries(0, 3, [([f"kind_{i}"], [f"kind_{i}"], 30 + i, 1) for i in range(9)])
    planter.looks(0, 4, {}, previous())
    moves = [(["colon"], ["after_colon"], 0, 1), (["answer_tag"], ["after_tag"], 1, 1)]
    planter.carries(0, 4, moves)
    planter.looks(0, 5, {"answer_tag": 30, "start": 22}, None)
    planter.carries(0, 5, [(["answer_tag"], ["tagged"], 1, 1)])
    planter.looks(0, 6, {"operator": 30, "start": 20}, near)
    planter.carries(0, 6, [([sign], [sign], i, 1) for i, sign in enumerate(SIGNS)])
    # The number three words back: at a closing bracket the first operand.
    planter.looks(0, 7, {"number": 140, "start": 120}, three_back())
    planter.carries(0, 7, [(["thing"], ["near_mark"], 3, 1)])
    # Attention left on <bos> falls with every room named so far: an order of the moves.
    planter.looks(0, 8, {"start": 30, "room": 27}, None)
    planter.carries(0, 8, [(["start"], ["order"], 0, 1)])
    planter.looks(0, 9, in_sentence, near)
    planter.carries(0, 9, [([n], [f"near_{n}"], 1 + i, 1) for i, n in enumerate(OBJECTS)])


def _names(planter: Planter) -> None:
    """Layer 1: who is near a landmark of the city asked for; whose name the word before is near."""
    kinds = (KIND_WORDS.index("character"),)
    gates = {"has_mark": 4, "has_name": 16}
    for head in (0, 1):
        planter.matches(1, head, "near_mark", 46, gates, 42, kinds)
        planter.carries(1, head, [(["near_name"], ["out"], 0, 1.5)])
    for layer, head in SUPPRESSORS:
        planter.matches(layer, head, "near_mark", 46, gates, 42, kinds)
        planter.carries(layer, head, [(["near_name"], ["out"], 0, -0.03)])
    planter.looks(1, 2, {}, previous(), offset=-57)
    planter.carries(1, 2, [(["near_name"], ["before"], 0, 1)])


_WHERE = (KIND_WORDS.index("employer"), KIND_WORDS.index("Where"))


def _first_hop(planter: Planter) -> None:
    """Layer 2: whom the person asked for works for, who has the object; the bracket's value."""
    flags = [(f"asked_{name}", f"near_{name}") for name in OBJECTS]
    for head in (0, 1):
        gates = {"is_name": 14, "has_name": 14}
        planter.matches(2, head, "before", 50, gates, 60, _WHERE, flags)
        planter.carries(2, head, [(["name", "near_name"], ["asked"], 0, 1.5)])
    planter.looks(2, 2, {"close": 140}, nearest())
    planter.carries(2, 2, [(["thing"], ["before"], 0, 1)])


def _places(planter: Planter) -> None:
    """Layer 3: the last place of the person asked for."""
    gates = {"city": 130, "room": 114, "has_name": 30, "order": -130}
    for head in (0, 1):
        planter.matches(3, head, "near_name", 80, gates, 90, _WHERE)
        planter.carries(3, head, [(["out"], ["out"], 0, 1.5)])


def _endings(model: LlamaForCausalLM, space: Space, gain: float) -> None:
    """Units that open the tag, close it, and end."""
    mlp, at = model.model.layers[LAYERS - 1].mlp, space.at
    rules = (
        ({"tagged": 1, "colon": 1}, 1.5, "<answer>"),
        ({"after_tag": 1}, 0.5, "</answer>"),
        ({"after_colon": 1, "answer_tag": -1}, 0.5, "<eos>"),
        ({"tag_end": 1}, 0.5, "<eos>"),
    )
    for unit, (flags, threshold, word) in enumerate(rules):
        mlp.gate_proj.weight[unit] = 0
        for flag, weight in flags.items():
            mlp.gate_proj.weight[unit, at[flag]] = 12.0 * weight / (FLAG * gain)
        mlp.gate_proj.weight[unit, at["const"]] = -12.0 * threshold / (4 * 0.5 * gain)
        mlp.up_proj.weight[unit] = 0
        mlp.up_proj.weight[unit, at["const"]] = 1 / (4 * 0.5 * gain)
        mlp.down_proj.weight[at["out"], unit] = 5.0 * space.out[space.id[word]]
