"""After a way of generating: another turn, another way, the same again. Right, or refused with nothing lost."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.tierkv.local_session import LocalPool, LocalSession
from tests.tierkv.tiny_models import CACHE, build, expected, greedy, longer, prompt, tiered
from tests.tierkv.ways import plain
from tierkv.errors import OutOfCapacity
from tierkv.model import attach
from tierkv.transformers_cache import TieredCache


@pytest.fixture
def llama() -> PreTrainedModel:
    return attach(build("llama")).model


def open_sessions(pool: LocalPool) -> list[LocalSession]:
    return [session for session in pool.sessions if not session.closed]


# No room for the forks -----------------------------------------------------------------------------------------------


def test_a_fork_that_gets_no_pages_leaves_no_other_fork_behind(llama: PreTrainedModel) -> None:
    """20 tokens are two pages; four of five beams' forks would need eight more, and six are there."""
    pool = LocalPool(attach(llama).geometry("float32"), pages=8)
    cache = TieredCache(pool.open())
    llama(**prompt(20), **{CACHE: cache})
    second = longer(prompt(20), prompt(4, seed=3)["input_ids"])
    with pytest.raises(OutOfCapacity):
        greedy(llama, second, cache, num_beams=5)
    assert open_sessions(pool) == cache.sessions
    assert len(pool.free) == 6
    assert torch.equal(greedy(llama, second, cache), expected(plain("llama"), second))


def test_beams_whose_tokens_get_no_pages_leave_the_rows_as_they_were(llama: PreTrainedModel) -> None:
    """Two beams fit their two pages each, and the two more of 20 new tokens fit only one of them."""
    pool = LocalPool(attach(llama).geometry("float32"), pages=6)
    cache = TieredCache(pool.open(), chunk_tokens=64)
    llama(**prompt(32), **{CACHE: cache})
    kept = list(cache.sessions)
    second = longer(prompt(32), prompt(20, seed=3)["input_ids"])
    with pytest.raises(OutOfCapacity):
        greedy(llama, second, cache, num_beams=2)
    assert open_sessions(pool) == cache.sessions == kept
    assert torch.equal(
        greedy(llama, second, cache, max_new_tokens=9), expected(plain("llama"), second, max_new_tokens=9)
    )


def test_a_mask_that_does_not_fit_forks_nothing(llama: PreTrainedModel) -> None:
    cache = tiered(attach(llama))
    llama(**prompt(20), **{CACHE: cache})
    with pytest.raises(ValueError, match="2-D mask"):
        llama(prompt(4, 4, seed=3)["input_ids"], attention_mask=torch.ones(2, 4), **{CACHE: cache})
    assert len(cache.sessions) == 1
