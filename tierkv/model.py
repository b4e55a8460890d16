"""`attach(model)`: run a transformers model over tierkv pages.

Attaching sets the model's attention implementation to `"tierkv"` and wraps `forward`. A forward that gets a
`TieredCache` runs over pages, in slices when the prompt is long; any other forward is what sdpa did before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from tierkv import model_support
from tierkv.errors import UnsupportedModel
from tierkv.geometry import PAGE_TOKENS, DTypeName, Geometry
from tierkv.slices import Slice
from tierkv.tiered_layer import IMPLEMENTATION, forwarding
from tierkv.transformers_cache import TieredCache

if TYPE_CHECKING:
    from tierkv.client import Client
    from tierkv.session import Session

CACHE_NAMES = ("cache", "past_key_values")
"""The cache argument of `forward`, in transformers 5.24 and before."""

Attempt = Literal["scout", "replayable", "final"]

_ATTACHED = "_tierkv_attached"


class AttachedModel:
    """A model that runs over pages until `detach`. Made by `attach`."""

    def __init__(self, model: PreTrainedModel) -> None:
        model_support.check_supported(model)
        self.model = model
        model_support.check_layers(model)
        self._num_layers = model_support.num_layers(model)
        self._previous = model.config._attn_implementation
        self._inner: Callable[..., Any] = model.forward
        self._names = list(inspect.signature(self._inner).parameters)
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise UnsupportedModel(
                f"{type(model).__name__}: it does not take its attention from AttentionInterface"
            )

        @functools.wraps(self._inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        self._shadowed = vars(model).get("forward")
        model.forward = forward
        setattr(model, _ATTACHED, self)

    @property
    def model_id(self) -> str:
        """Names the model's K/V: sessions of one id share codec state and, later, prefixes."""
        return model_support.model_id(self.model)

    def geometry(self, dtype: DTypeName | None = None, page_tokens: int = PAGE_TOKENS) -> Geometry:
        """The shape of this model's pages; `dtype` (of the pool) defaults to the model's."""
        return model_support.geometry(self.model, dtype, page_tokens)

    def open(self, client: Client, dtype: DTypeName | None = None, **options: Any) -> Session:
        """A session for one sequence of this model; `options` are those of `Client.open`."""
        return client.open(self.geometry(dtype, client.page_tokens), self.model_id, **options)

    def detach(self) -> None:
        """The model is as it was before `attach`. Doing it twice is harmless."""
        if getattr(self.model, _ATTACHED, None) is not self:
            return
        if self._shadowed is None:
            del self.model.forward
        else:
            self.model.forward = self._shadowed
        self.model.set_attn_implementation(self._previous)
        delattr(self.model, _ATTACHED)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((v for v in (*args, *kwargs.values()) if isinstance(v, TieredCache)), None)
        if cache is None:
            return self._inner(*args, **kwargs)
        kwargs.update(zip(self._names, args, strict=False))
        with torch.no_grad():
            return self._forward_tiered(cache, kwargs)

    def _forward_tiered(self, cache: TieredCache, kwargs: dict[str, Any]) -> Any:
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        if tokens is None:
            raise ValueError("forward needs input_ids or inputs_embeds")
        batch, columns = tokens.shape[:2]
        cache.begin_call()
        past = cache.padded_length
        if cache.verifies_drafts and 0 < past < columns and _starts_over(kwargs, columns, past):
            # Assisted decoding hands over the whole text again, whatever the cache holds; it reads the last logits.
            kwargs, columns = _cut(kwargs, past, columns, columns, 0), columns - past
        _refuse(kwargs, columns, past)
        if not cache.serves(self):
            cache.bind(self, model_support.own_layers(self.model), self._num_layers)
        slices = cache.slices(batch, columns)
        if len(slices) <= 1:
            return self._run_recalling(cache, batch, columns, kwargs)
        return self._run_sliced(cache, batch, columns, slices, kwargs)

    def _run_recalling(self, cache: TieredCache, batch: int, columns: int, kwargs: dict[str, Any]) -> Any:
        """One forward whose tokens are a query: what it misses comes back; before its result counts, if strict.

        A draft's verification and all slices of a long prompt but the last are run as they are.
        """
        if cache.verifies_drafts or not cache.recall.estimates or not cache.has_cold:
            return self._run(cache, batch, columns, kwargs)
        strict = cache.recall.mode == "strict" and cache.recall.pages > 0
        if columns > 1 and (not strict or cache.chunk_reads_all):
            outputs = self._run(cache, batch, columns, kwargs)
            cache.ask_for_pages(wait=strict)  # for the steps that follow
            return outputs
        if not strict:
            return self._run(cache, batch, columns, kwargs)
        if columns > 1:
            self._run(cache, batch, columns, self._scout_arguments(kwargs), attempt="scout")
        else:
            outputs = self._run(cache, batch, columns, kwargs, attempt="replayable")
            if outputs is not None:
                return outputs
        cache.ask_for_pages(wait=True)
        return self._run(cache, batch, columns, kwargs)

    def _scout_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Nobody reads a scout's logits."""
        keep = {"logits_to_keep": 1} if "logits_to_keep" in self._names else {}
        return {name: value for name, value in kwargs.items() if name != "labels"} | keep

    def _run(
        self, cache: TieredCache, batch: int, columns: int, kwargs: dict[str, Any], attempt: Attempt = "final",
        coming: int = 0,
    ) -> Any:  # fmt: skip
        """One forward as one step of every session: all of it, or nothing; `coming` columns follow it.

        Of a scout nothing is kept but estimates, and so of a replayable step that misses too much: both return None.
        """
        mask = kwargs.get("attention_mask")
        if mask is not None and not isinstance(mask, torch.Tensor):
            raise ValueError("a TieredCache takes the 2-D attention_mask of padding, not prepared masks")
        cache.begin_forward(batch, columns, kwargs.get("input_ids"), mask, attempt == "scout", coming)
        token = forwarding.set(cache)
        try:
            outputs = self._inner(**kwargs)
        except BaseException:
            cache.abandon_forward()
            raise
        finally:
            forwarding.reset(token)
        if attempt == "scout" or (attempt == "replayable" and cache.misses_much()):
            cache.abandon_forward()
            return None
        cache.end_forward()
        return outputs

    def _run_sliced(
        self, cache: TieredCache, batch: int, columns: int, slices: list[Slice], kwargs: dict[str, Any]
    ) -> Any:
        """A long prompt in slices, each committed, so that the daemon can demote as it goes."""
        if kwargs.get("labels") is not None:
            raise ValueError(
                f"labels over {columns} tokens, which a TieredCache reads in {len(slices)} forwards: none has the loss"
            )
        keep = kwargs.get("logits_to_keep", 0)
        if isinstance(keep, torch.Tensor) and keep.ndim != 1:
            raise ValueError("logits_to_keep of a prompt in slices is a number or 1-D positions")
        past = cache.padded_length
        outputs: list[Any] = []
        for start, stop in slices:
            part = _cut(kwargs, start, stop, columns, past)
            part["return_dict"] = True
            if isinstance(keep, torch.Tensor):
                part["logits_to_keep"] = 0
            elif keep > 0:
                # At least one: 0 would mean all of them.
                part["logits_to_keep"] = max(1, stop - max(start, columns - keep))
            if stop == columns:
                outputs.append(self._run_recalling(cache, batch, stop - start, part))
            else:
                coming = slices[len(outputs) + 1]
                outputs.append(self._run(cache, batch, stop - start, part, coming=coming[1] - coming[0]))
        joined = _join(outputs, keep)
        return joined if kwargs.get("return_dict", True) is not False else joined.to_tuple()


def attach(model: PreTrainedModel) -> AttachedModel:
    """Make `model` run over pages wherever it is given a `TieredCache`; attaching twice returns the first one.

    Raises:
        UnsupportedModel: attention that pages cannot serve (ALiBi, cross attention, latent attention, ...).
    """
    attached = getattr(model, _ATTACHED, None)
    return attached if isinstance(attached, AttachedModel) else AttachedModel(model)


def _starts_over(kwargs: dict[str, Any], columns: int, past: int) -> bool:
    """Whether mask or positions say that the columns begin at the text's first token, which the cache holds."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        return isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == columns
    return positions is not None and positions.ndim == 2 and int(positions[0, 0]) < past


def _refuse(kwargs: dict[str, Any], columns: int, past: int) -> None:
    """Calls that would be answered, and wrongly: transformers lets them through. Nothing is written yet."""
    if kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False with a TieredCache: pass use_cache=True, or no cache")
    if columns == 1:
        return
    mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep")
    if mask is None and past and _starts_over(kwargs, columns, past):
        raise ValueError(
            f"position_ids start below the {past} tokens that the TieredCache holds: pass the text that follows them, "
            "or call crop or reset first"
        )
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and isinstance(keep, int) and keep:
        real = mask[:, -columns:] != 0
        if bool((real.any(dim=1) & ~real[:, -1]).any()):
            raise ValueError("a row ends with padding, so its last logits are of no token: pad on the left")


def _cut(kwargs: dict[str, Any], start: int, stop: int, columns: int, past: int) -> dict[str, Any]:
    """The arguments of columns `[start, stop)`; the mask reaches back to the first cached column."""
    part = dict(kwargs)
    for name in ("input_ids", "inputs_embeds"):
        if part.get(name) is not None:
            part[name] = part[name][:, start:stop]
    for name in ("position_ids", "cache_position", "token_type_ids"):
        if part.get(name) is not None and part[name].shape[-1] == columns:
            part[name] = part[name][..., start:stop]
    mask = part.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        part["attention_mask"] = mask[:, : past + stop]
    return part


def _join(outputs: list[Any], logits_to_keep: int | torch.Tensor) -> Any:
    """The last output with what belongs to tokens put together along the token axis."""
    last = outputs[-1]
    if last.get("logits") is not None:
        logits = torch.cat([output.logits for output in outputs], dim=1)
        if isinstance(logits_to_keep, torch.Tensor):
            logits = logits[:, logits_to_keep]
        last["logits"] = logits[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else logits
    if last.get("last_hidden_state") is not None:
        last["last_hidden_state"] = torch.cat([output.last_hidden_state for output in outputs], dim=1)
    if last.get("hidden_states") is not None:
        layers = zip(*(output.hidden_states for output in outputs), strict=True)
        last["hidden_states"] = tuple(torch.cat(parts, dim=1) for parts in layers)
    return last


__all__ = ["AttachedModel", "attach"]
