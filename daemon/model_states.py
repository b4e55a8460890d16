"""Room in HBM for the states of models: what codecs and digests are fitted to."""

from __future__ import annotations

from tierkv.daemon.allocator import aligned
from tierkv.daemon.sessions import Model
from tierkv.daemon.state import State
from tierkv.geometry import Geometry
from tierkv.prefetch.deviation import DEVIATION
from tierkv.table import NOWHERE


def open_model(state: State, model_id: str, geometry: Geometry) -> Model | None:
    """The model, with room for its state; `None` where HBM has none. With `digest = auto` that of digests, which is
    large and lies in one piece, is done without where pages fill HBM.

    Raises as `State.register_model`.
    """
    model = state.register_model(model_id, geometry)
    if not reserve(state, model) and state.config.digest == "auto":
        state.forget_model(model)
        model = state.register_model(model_id, geometry, DEVIATION)
    if reserve(state, model):
        return model
    state.forget_model(model)
    return None


def reserve(state: State, model: Model) -> bool:
    """Whether the model has a block for its state, or needs none."""
    if model.state_bytes and model.state_offset == NOWHERE:
        block = state.hbm.allocate_block(aligned(model.state_bytes))
        model.state_offset = NOWHERE if block is None else block
    return not model.state_bytes or model.state_offset != NOWHERE


__all__ = ["open_model", "reserve"]
