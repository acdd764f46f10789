"""The scores of every head in one trial: pure functions of small tensors.

Letters in the shapes: H query heads, Hk key/value heads, d head_dim, R rows (positions whose query
is looked at), T answer steps, C key columns, n needle positions. One layer at a time.

For answer step t, head h and key position j, with attention weight a, value v, the head's slice
W_O of the output projection and the unembedding row u of the token generated at step t,

    phi[t, j] = a[t, j] * (u[t] . W_O v[j])

(LOCOS, arXiv 2607.01002). No sum over j is ever written out position by position: the sum over all
keys is u . W_O z with z the head's ordinary output, and the sum over the needle needs the
attention on the needle only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lm_eval_locos.errors import ModelError

METHODS = ("locos", "dla", "attention_spatial", "wu", "contrastive", "headkv")
"""The rankings that one pass gives."""
VARIANTS = ("contrastive_mean",)
"""More of them, on request."""
ANCHOR_ROWS = 8
"""HeadKV looks at the attention of the last 8 prompt positions."""
TOP = 10
"""The contrastive ranking looks at the 10 most attended positions."""

_CHUNK = 2**23  # logits held at a time: 32 MiB


# -- from what was captured to small tensors ---------------------------------------------------


@dataclass(frozen=True)
class Needle:
    """What R rows of one layer and one sequence do with the needle.

    Attributes:
        mass: attention weight on the needle, (R, H).
        total: attention weight on all keys, (R, H); below 1 where the family has sinks.
        output: sum of weight times value over the needle, (R, H, d).
        visible: number of needle positions that a row sees, (R,).
        keys: number of keys that a row sees, (R,).
        top: the most attended columns, best first, (R, H, k); k = min(10, C). Where a row sees
            fewer than k keys the last ones are -1.
    """

    mass: Tensor
    total: Tensor
    output: Tensor
    visible: Tensor
    keys: Tensor
    top: Tensor

    def __getitem__(self, rows: Sequence[int]) -> Needle:
        index = torch.as_tensor(rows, dtype=torch.long, device=self.mass.device)
        return Needle(**{name: value[index] for name, value in vars(self).items()})


def visible_columns(
    columns: Sequence[int], first: int, count: int, padding: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """The keys that each row sees, as half-open ranges [low, high) of the ``count`` kept columns.

    A query at column p sees the columns c with padding <= c <= p, in a sliding-window layer also
    c > p - window (DESIGN: a layer's N counts its visible keys only). Two tensors of shape (R,).
    """
    at = torch.tensor(columns)
    low = torch.full_like(at, padding) if window is None else (at - window + 1).clamp(min=padding)
    return (low - first).clamp(0, count), (at + 1 - first).clamp(0, count)


def read_needle(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: tuple[Tensor, Tensor],
    needle: tuple[int, int],
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    top: bool = True,
) -> Needle:
    """Attention of R rows on the needle, from queries, keys and values; float32 throughout.

    A weight is exp(logit - log-sum-exp over the keys that the row sees), so that only the needle's
    weights are ever formed. Logits: scaling * q.k, then the soft cap if any; a sink adds one more
    logit to the sum.

    Args:
        query: (H, R, d), rotated; query head h reads key/value head h // (H / Hk).
        keys: (Hk, C, d).
        values: (Hk, C, d).
        visible: see `visible_columns`, ranges in the C columns.
        needle: [start, end) in the C columns; may reach outside them.
        scaling: factor on the logits.
        softcap: softcap * tanh(logit / softcap) is applied.
        sinks: (H,).
        top: whether the most attended columns are wanted; without, ``top`` has k = 0.
    """
    heads, rows, size = query.shape
    kv_heads, count, _ = keys.shape
    start, end = (min(max(edge, 0), count) for edge in needle)
    keys = keys.float()
    needle_values = values[:, start:end].float()
    low, high = (edge.to(keys.device) for edge in visible)
    column = torch.arange(count, device=keys.device)
    k = min(TOP, count) if top else 0
    parts: list[tuple[Tensor, ...]] = []
    step = max(1, _CHUNK // max(1, heads * count))
    for i in range(0, rows, step):
        q = query[:, i : i + step].float() * scaling
        r = q.shape[1]
        grouped = heads // kv_heads * r
        logits = torch.matmul(q.reshape(kv_heads, grouped, size), keys.mT)
        logits = logits.view(heads, r, count)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        seen = (column >= low[i : i + r, None]) & (column < high[i : i + r, None])
        if not bool(seen.all()):
            logits.masked_fill_(~seen, float("-inf"))
        log_keys = logits.logsumexp(-1)  # (H, r)
        log_all = log_keys
        if sinks is not None:
            log_all = torch.logaddexp(log_keys, sinks.float()[:, None])
        weights = (logits[..., start:end] - log_all[..., None]).exp()
        output = torch.matmul(weights.reshape(kv_heads, grouped, end - start), needle_values)
        best = torch.topk(logits, k, -1)
        columns = best.indices.masked_fill(best.values == float("-inf"), -1)
        parts.append(
            (
                weights.sum(-1).T,
                (log_keys - log_all).exp().T,
                output.view(heads, r, size).transpose(0, 1),
                columns.transpose(0, 1),
            )
        )
    mass, total, output, columns = (torch.cat(part) for part in zip(*parts, strict=True))
    inside = (high.clamp(start, end) - low.clamp(start, end)).clamp(min=0)
    return Needle(mass, total, output, inside, high - low, columns)


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
    if type(projection) is nn.Linear and weight.is_floating_point() and not weight.is_meta:
        return u.to(weight.device) @ weight.float()
    # Adapters, packed or offloaded weights: the projection is linear, so that its gradient is
    # the transposed weight, whatever the form it is stored in.
    size = projection.in_features
    with torch.inference_mode(False), torch.enable_grad():
        dtype = _compute_dtype(projection)
        device = next(projection.parameters()).device
        if device.type == "meta":
            device = u.device
        z = torch.zeros(len(u), size, dtype=dtype, device=device, requires_grad=True)
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
    for parameter in projection.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return getattr(projection, "compute_dtype", None) or torch.float32


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
        visible: n, (T,).
        keys: N, (T,).
    """
    n, off = visible.double(), (keys - visible).double()
    ratio = torch.where(off > 0, n / off.clamp(min=1), 0.0)[:, None]
    score = needle.double() - ratio * (total.double() - needle.double())
    return torch.where(visible[:, None] > 0, score, 0.0)


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
        visible: n, (T,).
        keys: N, (T,).
    """
    return contrast(mass, total, visible, keys).mean(0)


def wu(argmax: Tensor, generated: Tensor, prompt: Tensor, needle: tuple[int, int]) -> Tensor:
    """The retrieval score of Wu et al. 2025 ("Retrieval head mechanistically explains long-context
    factuality"): the share of the needle's distinct tokens that the head copies, shape (H,).

    A head copies a token at a decoding step where its most attended position lies in the needle
    and holds the very token that is generated.

    Args:
        argmax: most attended token position of each decoding step, (R, H); the generated tokens
            come after the prompt's.
        generated: id of the token generated at each step, (R,).
        prompt: ids of the prompt's tokens.
        needle: [start, end) in the prompt.
    """
    start, end = needle
    inside = (argmax >= start) & (argmax < end)
    attended = prompt[argmax.clamp(start, end - 1)]
    copies = inside & (attended == generated[:, None])  # (R, H)
    tokens = prompt[start:end].unique()
    copied = copies.T[:, :, None] & (generated[:, None] == tokens)  # (H, R, distinct)
    return copied.any(1).double().mean(1)


def top_overlap(top: Tensor, needle: tuple[int, int]) -> Tensor:
    """The share of a row's most attended columns that lie in the needle: (R, H, k) to (R, H).

    Columns of -1 do not exist (fewer than 10 keys) and do not count; the needle may reach outside
    the columns that were kept.
    """
    inside = (top >= max(0, needle[0])) & (top < needle[1])
    return inside.sum(-1).double() / (top >= 0).sum(-1).clamp(min=1)


def contrastive(signal: Tensor, answer: Tensor) -> Tensor:
    """Mean of ``signal`` over answer steps less its mean over the other decoding steps, (H,).

    A baseline of the LOCOS paper. ``signal`` is the top-10 overlap with the needle
    (`top_overlap`), or in the variant the mean attention weight a needle position gets. The other
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
