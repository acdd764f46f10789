"""What is kept of a batch while it is generated: references, and copies where a cache would change.

    >>> layer = capture.layers[3]
    >>> layer.queries().shape, layer.columns    # (batch, heads, rows, head_dim), of the last rows
    (torch.Size([1, 9, 12, 64]), range(1492, 1504))

Positions are absolute columns of the padded batch: column c holds the c-th token fed, left padding
included.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Cache

from lm_eval_locos.architecture import Architecture, AttentionLayer, HeadSlices
from lm_eval_locos.errors import ModelError


class LayerCapture:
    """What is kept of one layer: B sequences, H query heads, Hk key/value heads, R rows.

    Attributes:
        kind, window: which keys a query sees, as in `AttentionLayer`.
        scaling: factor on the logits.
        softcap: soft cap on the scaled logits, or None.
        sinks: one extra logit a head, shape (H,), that takes part in the softmax, or None.
    """

    def __init__(self, layer: AttentionLayer, gate: HeadSlices | None, seen: int) -> None:
        self.kind, self.window = layer.kind, layer.window
        self._gate_slices = gate
        self.scaling = 1.0
        self.softcap: float | None = None
        self.sinks: Tensor | None = None
        self._seen = seen
        self._rows = 0
        self._first = 0
        self._queries: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._gates: list[Tensor] = []
        self._query_output: Tensor | None = None
        self._latent: tuple[nn.Module, Cache] | None = None

    @property
    def columns(self) -> range:
        """The absolute column of each kept row: the last ones that were fed."""
        return range(self._seen - self._rows, self._seen)

    def queries(self) -> Tensor:
        """The rotated queries of the kept rows, (B, H, R, head_dim).

        Raises:
            ModelError: no attention call was seen.
        """
        if not self._queries:
            raise ModelError(
                "the attention ran without a call of its kernel, so that its heads cannot be "
                "scored. Load the model with attn_implementation=sdpa."
            )
        return torch.cat(self._queries, 2)

    def outputs(self) -> Tensor:
        """Every head's output (the o_proj input) in the kept rows, (B, H, R, head_dim)."""
        read = torch.cat(self._outputs, 1).transpose(1, 2)
        gates = self.gates()
        return read if gates is None else read * gates

    def gates(self) -> Tensor | None:
        """What each head's output is multiplied by, (B, H, R, head_dim), or None."""
        if self._gate_slices is None:
            return None
        return self._gate_slices.split(torch.cat(self._gates, 1)).transpose(1, 2).sigmoid()

    def keys_values(self) -> tuple[Tensor, Tensor, int]:
        """Keys and values (B, Hk, C, head_dim) and the absolute column of the first of the C.

        They hold every column that a kept row sees. Latent attention forms them anew: ask once.
        """
        if self._latent is not None:
            attention, cache = self._latent
            layer = cache.layers[attention.layer_idx]
            keys, values = attention.expand_kv(layer.keys, layer.values)
            return keys[:, :, : self._seen], values[:, :, : self._seen], 0
        if len(self._keys) > 1:
            self._keys, self._values = [torch.cat(self._keys, 2)], [torch.cat(self._values, 2)]
        return self._keys[0], self._values[0], self._first

    def record(
        self, first_row: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        """Keeps rows from column ``first_row`` on of one attention call.

        Args:
            query: (B, H, Q, head_dim), of the last Q columns.
            key: (B, Hk, K, head_dim), after the cache update.
            value: as ``key``.
            output: (B, Q, H, head_dim).
        """
        gates, self._query_output = self._query_output, None
        count, total = query.shape[2], key.shape[2]
        seen = self._seen = self._seen + count
        rows = min(count, seen - first_row)
        if rows <= 0:
            return
        # A slice would keep the whole prompt's queries alive: it is copied.
        self._queries.append(query if rows == count else query[:, :, -rows:].clone())
        self._outputs.append(output if rows == count else output[:, -rows:].clone())
        if gates is not None:
            self._gates.append(gates if rows == count else gates[:, -rows:].clone())
        self._rows += rows
        if self._latent is not None:
            return
        # A static cache hands out all its slots; those after the last token are empty.
        filled = min(total, seen)
        if self.window is None:
            if filled < total:
                key, value = key[:, :, :filled], value[:, :, :filled]
            self._keys, self._values = [key], [value]
        elif not self._keys:
            # The cache will drop these columns, or write others in their place: copied.
            offset = max(0, seen - total)
            self._first = max(offset, seen - rows - self.window + 1)
            self._keep(key, value, self._first - offset, filled)
        else:
            self._keep(key, value, filled - count, filled)

    def _keep(self, key: Tensor, value: Tensor, start: int, end: int) -> None:
        self._keys.append(key[:, :, start:end].clone())
        self._values.append(value[:, :, start:end].clone())

    def keep_gate(self, query_output: Tensor) -> None:
        """Keeps the query module's output, where the gates are, until `record` knows the rows."""
        self._query_output = query_output

    def keep_latent(self, attention: nn.Module, cache: Cache) -> None:
        """Keeps the cache in the place of keys and values, which are formed from what it holds."""
        self._latent = attention, cache

    def release(self) -> None:
        """Drops references to a growing cache's tensors before it replaces them."""
        if self.window is None:
            self._keys, self._values = [], []


class Capture:
    """What is kept of one batch: ``layers[i]`` of decoder layer i, if it has attention."""

    def __init__(self, architecture: Architecture, first_row: int, seen: int) -> None:
        self.first_row = first_row
        self.layers = {
            index: LayerCapture(layer, architecture.gate_slices, seen)
            for index, layer in architecture.layers.items()
        }

    def release(self) -> None:
        """To be called before a forward pass where memory is tight: the cache grows by copying,
        and without the references held here the old copy is free at once. Optional."""
        for layer in self.layers.values():
            layer.release()
