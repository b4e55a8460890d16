"""What a model's attention hands to transformers' attention interface, read from its source.

An argument that pages do not know would change the answers, and the interface takes any argument: so a model is
refused for it when it is attached, not in the step that first passes it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

INTERFACE = "attention_interface"
"""What all of transformers' models call the function that they look up."""

SERVED = frozenset({
    "attention_mask", "dropout", "is_causal", "output_attentions", "position_ids", "s_aux", "scaling",
    "sliding_window", "softcap",
})  # fmt: skip
"""Arguments that pages serve, or that change nothing over pages."""

MASKS = frozenset({"attention_mask", "causal_mask"})
"""Names of the mask as transformers made it; another is of the model's own making."""

MASK_POSITION = 4
"""Among the positional arguments, behind the module, query, key and value."""


class Calls(NamedTuple):
    """Of one class of modules."""

    readable: bool  # whether its source is there
    found: bool  # whether it calls the interface
    unserved: tuple[str, ...]  # arguments that pages do not know


def calls_of(kind: type[nn.Module]) -> Calls:
    """What `kind` passes wherever it calls the interface."""
    try:
        calls = [call for function in _methods(kind) for call in _interface_calls(function)]
    except (OSError, TypeError, SyntaxError):  # built at run time, or shipped without source
        return Calls(readable=False, found=False, unserved=())
    unserved = {word.arg for call in calls for word in call.keywords if word.arg is not None} - SERVED
    if any(not _masked_as_given(call) for call in calls):
        unserved.add("an attention mask of its own")
    return Calls(readable=True, found=bool(calls), unserved=tuple(sorted(unserved)))


def _methods(kind: type[nn.Module]) -> Iterator[object]:
    seen: set[str] = set()
    for owner in kind.__mro__:
        if owner is nn.Module:
            return
        for name, value in vars(owner).items():
            if name not in seen and inspect.isfunction(value):
                seen.add(name)
                yield value


def _interface_calls(function: object) -> list[ast.Call]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == INTERFACE
    ]


def _masked_as_given(call: ast.Call) -> bool:
    masks = [word.value for word in call.keywords if word.arg == "attention_mask"]
    masks += call.args[MASK_POSITION : MASK_POSITION + 1]
    return all(isinstance(mask, ast.Name) and mask.id in MASKS for mask in masks)


__all__ = ["SERVED", "Calls", "calls_of"]
