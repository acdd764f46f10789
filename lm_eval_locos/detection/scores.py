"""The scores of every head in one trial: pure functions of small tensors.

Letters in the shapes: H query heads, Hk key/value heads, d head_dim, R rows (positions whose query
is looked at), T answer steps, C key columns, n needle positions. Scores take the heads of one layer
or of all layers side by side.

For answer step t, head h and key position j, with attention weight a, value v, the head's slice
W_O of the output projection and the unembedding row u of the token generated at step t,

    phi[t, j] = a[t, j] * (u[t] . W_O v[j])

(LOCOS, arXiv 2607.01002). Where a gate g[t] multiplies the head's output, it multiplies v[j] too,
as what the head writes at step t is W_O (g[t] * v[j]).

No sum over j is ever written out position by position: the sum over all keys is u . W_O z with z
the head's ordinary output, and the sum over the needle needs the attention on the needle only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lm_eval_locos.architecture import Kind
from lm_eval_locos.errors import ModelError

METHODS = ("locos", "dla", "attention_spatial", "wu", "contrastive", "headkv")
"""The rankings that one pass gives."""
VARIANTS = ("contrastive_mean",)
"""More of them, on request."""
ANCHOR_ROWS = 8
"""HeadKV looks at the attention of the last 8 prompt positions."""
TOP = 10
"""The contrastive ranking looks at the 10 most attended positions."""


# -- from what was captured to small tensors ---------------------------------------------------


def visible_columns(
    columns: Sequence[int], padding: int, kind: Kind, window: int | None
) -> tuple[list[int], list[int]]:
    """The keys that each row sees, as absolute columns [low, high).

    A query at column p sees the columns c with padding <= c <= p, in a sliding-window layer also
    c > p - window, in a chunked layer those of its own chunk, counted from the padding on; only
    these count in a layer's N.
    """
    if window is None:
        reach = [0 for _ in columns]
    elif kind == "chunked":
        reach = [column - (column - padding) % window for column in columns]
    else:
        reach = [column - window + 1 for column in columns]
    return [max(padding, low) for low in reach], [column + 1 for column in columns]


def attention_logits(
    query: Tensor,
    keys: Tensor,
    low: Sequence[int],
    high: Sequence[int],
    *,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Logits of R rows, (H, R, C), float32; -inf where a row does not see a column.

    A logit is scaling * q.k, then softcap * tanh(logit / softcap) where there is a soft cap.

    Args:
        query: (H, R, d), rotated; query head h reads key/value head h // (H / Hk).
        keys: (Hk, C, d).
        low: first of the C columns that each row sees.
        high: one past the last of them.
        scaling: factor on the logits.
        softcap: soft cap, or None.
    """
    heads, rows, size = query.shape
    grouped = (query.float() * scaling).reshape(len(keys), -1, size)
    logits = torch.matmul(grouped, keys.float().mT).view(heads, rows, -1)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    # Rows are neighbours: what some see and others do not is a few columns at either end.
    count, device = logits.shape[2], logits.device
    for start, end, edge, before in (
        (0, max(low), low, True),
        (min(high), count, high, False),
    ):
        if start < end:
            column = torch.arange(start, end, device=device)
            limit = torch.tensor(edge, device=device)[:, None]
            unseen = column < limit if before else column >= limit
            logits[..., start:end].masked_fill_(unseen, float("-inf"))
    return logits


def needle_weights(
    logits: Tensor, needle: tuple[int, int], sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention weights on the needle (H, R, n), and the weight on all keys (H, R).

    A sink adds one logit to the softmax, so that the keys' weights sum to less than 1.

    Args:
        logits: (H, R, C).
        needle: [start, end) in the C columns.
        sinks: (H,), or None.
    """
    count = logits.shape[-1]
    if sinks is not None:
        extra = sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)
        logits = torch.cat([logits, extra], -1)
    weights = logits.softmax(-1)
    total = weights.new_ones(weights.shape[:2]) if sinks is None else weights[..., :count].sum(-1)
    return weights[..., slice(*needle)], total


def weighted_values(weights: Tensor, values: Tensor) -> Tensor:
    """The sum of weight times value: weights (H, R, n), values (Hk, n, d) give (H, R, d)."""
    heads, rows, count = weights.shape
    grouped = weights.reshape(len(values), heads // len(values) * rows, count)
    return torch.matmul(grouped, values.float()).view(heads, rows, -1)


def most_attended(logits: Tensor, needle: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Where the needle stands among the most attended columns of each row.

    Args:
        logits: (H, R, C).
        needle: [start, end) in the C columns.

    Returns:
        The place within the needle of a row's most attended column, -1 if that is elsewhere,
        (H, R) int64; and the share of its 10 most attended columns (of all, where it sees fewer)
        that lie in the needle, (H, R).
    """
    start, end = needle
    overlap = torch.zeros(logits.shape[:2], device=logits.device)
    best = torch.full_like(overlap, -1, dtype=torch.long)
    if start >= end:
        return best, overlap
    strongest, place = logits[..., start:end].max(-1)
    # Sorting every row would cost more than all the rest together. Where the best of ten groups of
    # columns are above the needle, none of its columns is among the ten best.
    even = logits.shape[2] // 8 * 8
    groups = logits[..., :even]
    for _ in range(3):
        groups = torch.maximum(*groups.chunk(2, -1))
    groups = torch.cat([groups, logits[..., even:]], -1)
    above = (groups > strongest[..., None]).sum(-1)
    visible = strongest > float("-inf")
    best = torch.where((above == 0) & visible, place, best)
    near = (above < TOP) & visible
    rows = logits[near]
    top = rows.topk(min(TOP, rows.shape[1]), -1)
    seen = top.values > float("-inf")
    inside = (top.indices >= start) & (top.indices < end) & seen
    overlap[near] = inside.sum(-1) / seen.sum(-1)
    return best, overlap


def direct_effect(projection: nn.Module, u: Tensor) -> Tensor:
    """W_O^T u of every head: a head's output z adds z . (W_O^T u) to the logit that u reads.

    Args:
        projection: the layer's output projection, (H * d) -> hidden; with a PEFT adapter the
            adapted one.
        u: unembedding rows, (T, hidden), float32.

    Returns:
        (T, H * d), float32.

    Raises:
        ModelError: a packed (quantised) projection through which no gradient flows.
    """
    weight = getattr(projection, "weight", None)
    # A quantiser may put a tensor of its own into an ordinary Linear.
    if type(projection) is nn.Linear and type(weight) is nn.Parameter and not weight.is_meta:
        return u.to(weight.device) @ weight.float()
    # Adapters, packed or offloaded weights: the projection is linear, so that its gradient is
    # the transposed weight, whatever the form it is stored in.
    # GPT-2's Conv1D has another name for it.
    size = getattr(projection, "in_features", None) or projection.nx
    with torch.inference_mode(False), torch.enable_grad():
        dtype = _compute_dtype(projection)
        # Packed weights may be buffers; those that are offloaded come to where their input is.
        weights = (*projection.parameters(), *projection.buffers())
        held = next((tensor for tensor in weights if not tensor.is_meta), u)
        z = torch.zeros(len(u), size, dtype=dtype, device=held.device, requires_grad=True)
        try:
            written = projection(z)
            gradient = u.clone().to(written)
            (effect,) = torch.autograd.grad(written, z, gradient)
        except (RuntimeError, NotImplementedError) as error:
            raise ModelError(
                f"{type(projection).__name__}: heads cannot be scored through this output "
                f"projection ({error}). Load the model without quantisation for detection."
            ) from error
    return effect.float()


def _compute_dtype(projection: nn.Module) -> torch.dtype:
    """Of the first floating weight, else what a quantised layer names, else of its scales."""
    named = getattr(projection, "compute_dtype", None)
    found = [parameter.dtype for parameter in projection.parameters()]
    found += [named] if named is not None else []
    found += [buffer.dtype for buffer in projection.buffers()]
    return next((dtype for dtype in found if dtype.is_floating_point), torch.float32)


def logit_contribution(z: Tensor, effect: Tensor) -> Tensor:
    """u . W_O z of every head: z (T, H, d) and effect (T, H * d) give (T, H), float64."""
    return (z.double() * effect.view(z.shape).double()).sum(-1)


# -- the scores --------------------------------------------------------------------------------


def contrast(needle: Tensor, total: Tensor, visible: Tensor, keys: Tensor) -> Tensor:
    """plus - minus at each step: the needle's sum less its share of the rest's.

    With n needle positions and N keys visible to the layer (section 3 of the LOCOS paper)

        plus  = sum of phi over the needle
        minus = n / (N - n) * sum of phi off the needle

    so that a head which reads every key alike scores 0. Nothing visible off the needle (N = n)
    makes minus 0, no visible needle position makes both 0.

    Args:
        needle: sum of phi over the needle, (T, H).
        total: sum of phi over all keys, (T, H).
        visible: n, (T, H) or (T, 1).
        keys: N, likewise.
    """
    n, off = visible.double(), (keys - visible).double()
    ratio = torch.where(off > 0, n / off.clamp(min=1), 0.0)
    score = needle.double() - ratio * (total.double() - needle.double())
    return torch.where(visible > 0, score, 0.0)


def locos(needle: Tensor, total: Tensor, visible: Tensor, keys: Tensor) -> Tensor:
    """LOCOS, arXiv 2607.01002, equations 1 to 3: mean over answer steps of plus - minus.

    Arguments as for `contrast`, with phi the logit contribution; the result has shape (H,), in
    logits. Equation 4 pools trials with their numbers of answer steps as weights.
    """
    return contrast(needle, total, visible, keys).mean(0)


def dla(total: Tensor) -> Tensor:
    """Direct logit attribution (a baseline of the LOCOS paper): mean over answer steps of the sum
    of phi over *all* keys, u . W_O z. (T, H) gives (H,), in logits."""
    return total.double().mean(0)


def attention_spatial(mass: Tensor, total: Tensor, visible: Tensor, keys: Tensor) -> Tensor:
    """LOCOS with phi = a, attention alone (a baseline of the LOCOS paper): shape (H,).

    Args:
        mass: attention on the needle, (T, H).
        total: attention on all keys, (T, H); 1 except where the family has sinks.
        visible: n, (T, H) or (T, 1).
        keys: N, likewise.
    """
    return contrast(mass, total, visible, keys).mean(0)


def wu(best: Tensor, generated: Tensor, needle: Tensor) -> Tensor:
    """The retrieval score of Wu et al. 2025 ("Retrieval head mechanistically explains long-context
    factuality"): the share of the needle's distinct tokens that the head copies, shape (H,).

    A head copies a token at a decoding step where its most attended position lies in the needle
    and holds the very token that is generated.

    Args:
        best: place in the needle of the most attended position at each decoding step, -1 if that
            is elsewhere, (R, H).
        generated: id of the token generated at each step, (R,).
        needle: ids of the needle's tokens, (n,).
    """
    copies = (best >= 0) & (needle[best.clamp(min=0)] == generated[:, None])  # (R, H)
    copied = copies.T[:, :, None] & (generated[:, None] == needle.unique())  # (H, R, distinct)
    return copied.any(1).double().mean(1)


def contrastive(signal: Tensor, answer: Tensor) -> Tensor:
    """Mean of ``signal`` over answer steps less its mean over the other decoding steps, (H,).

    A baseline of the LOCOS paper. ``signal`` is the top-10 overlap with the needle
    (`most_attended`), or in the variant the mean attention weight a needle position gets. The other
    steps are those of every content token that is no answer token, and the step that stopped the
    generation. Without any the second mean is 0.

    Args:
        signal: (R, H).
        answer: whether a step is an answer step, (R,) bool.
    """
    signal = signal.double()
    here, there = signal[answer], signal[~answer]
    return here.mean(0) - (there.mean(0) if len(there) else 0.0)


def headkv(mass: Tensor) -> Tensor:
    """HeadKV's importance ("Not all heads matter", arXiv 2410.19258) as the LOCOS paper uses it:
    the largest attention mass on the needle over the last 8 prompt positions. (8, H) gives (H,).

    Needs no generation, so that no trial is filtered out.
    """
    return mass.double().amax(0)
