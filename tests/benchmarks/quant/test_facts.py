"""Facts are asked over caches whose old tokens are packed, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import PreTrainedModel

from tests.benchmarks.quant.records import record_of, show
from tests.benchmarks.quant.through import Zeros
from tests.tierkv.tiny_models import build
from tierkv.benchmarks.quant import RECENT, SINKS, facts_report
from tierkv.benchmarks.quant.facts import EXACT_CACHE, Aging, Facts, ask
from tierkv.benchmarks.quant.forms import Form
from tierkv.benchmarks.quant.plan import plan
from tierkv.regions import Region
from tierkv.study.episodes import Block, Episode, Probe, load_episodes
from tierkv.study.probe import ANSWER_TOKENS

ZEROS = Form("zeros", True, Zeros, 16)
LAYERS, HEADS, DIM = 3, 2, 16  # of tiny_models


class Lossless(Zeros):
    """Keeps everything."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv.clone()


class Characters:
    """Token `i` is character `i` from a blank on."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(character) - 32 for character in text])

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(32 + token) for token in tokens)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama")


def ones(tokens: int) -> torch.Tensor:
    return torch.ones(LAYERS, 2, HEADS, tokens, DIM)


def held(cache: Aging) -> list[float]:
    """The value of each token, which all layers, keys, values, heads and channels share."""
    kv = torch.stack([torch.cat((layer.keys, layer.values)) for layer in cache.layers])
    lowest, highest = kv.amin((0, 1, 2, 4)), kv.amax((0, 1, 2, 4))
    assert torch.equal(lowest, highest)
    return highest.tolist()


def test_whole_groups_between_sinks_and_recent_tokens_are_packed(model: PreTrainedModel) -> None:
    cache = Aging(model.config, ZEROS, ones(16 + 32 + 15 + 80).unbind())
    cache.age()
    assert held(cache) == [1.0] * 16 + [0.0] * 32 + [1.0] * (15 + 80)


def test_recent_tokens_follow_what_is_written(model: PreTrainedModel) -> None:
    cache = Aging(model.config, ZEROS, ones(16 + 32 + 15 + 80).unbind())
    cache.age()
    for layer, (keys, values) in enumerate(2 * ones(1)):
        cache.update(keys[None], values[None], layer)
    cache.age()
    assert held(cache) == [1.0] * 16 + [0.0] * 48 + [1.0] * 79 + [2.0]


def test_what_is_too_short_or_has_no_form_stays_exact(model: PreTrainedModel) -> None:
    for form, tokens in ((ZEROS, SINKS + 15 + RECENT), (ZEROS, 3), (None, 500)):
        cache = Aging(model.config, form, ones(tokens).unbind())
        cache.age()
        assert held(cache) == [1.0] * tokens


def test_a_fork_is_written_and_ages_alone(model: PreTrainedModel) -> None:
    cache = Aging(model.config, ZEROS, ones(16 + 32 + 80).unbind())
    cache.age()
    with cache.fork() as fork:
        for layer, (keys, values) in enumerate(ones(16)):
            fork.update(keys[None], values[None], layer)
        fork.age()
        assert held(fork) == [1.0] * 16 + [0.0] * 48 + [1.0] * 80
    assert held(cache) == [1.0] * 16 + [0.0] * 32 + [1.0] * 80


def greedy(model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """Without any cache: the whole text again for each token."""
    tokens = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[-count:]


def test_a_form_without_loss_answers_as_the_exact_cache_and_one_that_forgets_does_not(
    model: PreTrainedModel,
) -> None:
    tokenizer = Characters()
    text = tokenizer.decode(torch.randint(2, 95, (220,), generator=torch.Generator().manual_seed(4)).tolist())
    said = tokenizer.decode(greedy(model, tokenizer(text + "where?").input_ids, ANSWER_TOKENS))
    probes = (Probe(Region.USER, "where?", said.strip()), Probe(Region.USER, "where?", "no" + said))
    episode = Episode("den", "Den", (Block(Region.USER, text),), probes)
    found = ask(model, tokenizer, [Form("lossless", True, Lossless, 32), ZEROS], [episode], lambda *_: None)  # type: ignore[arg-type]
    assert [(name, one.facts, one.facts_asked) for name, one in found.items()] == [
        (EXACT_CACHE, 1, 2), ("lossless", 1, 2), ("zeros", 0, 2),
    ]  # fmt: skip
    assert list(found["lossless"].facts_missed) == [f"den: no{said}"]
    assert said.startswith(found["lossless"].facts_missed[f"den: no{said}"])
    assert (found[EXACT_CACHE].bits_per_value, found["zeros"].bits_per_value) == (32, 0)


def test_the_table_of_a_run_has_facts_only_if_they_were_asked() -> None:
    assert "facts" not in show([record_of("k3v2", 2.65625, 0.1)]).lower()
    shown = show([record_of("k3v2", 2.65625, 0.1, facts=23)])
    assert "23/24" in shown and "Facts over the exact cache: 24 of 24" in shown


def test_the_table_of_facts_names_what_was_missed() -> None:
    known = {"k3v2": Facts(2.65625, 3, 4, {"den: Jasper": " Opal"})}
    console = Console(width=120)
    with console.capture() as captured:
        console.print(facts_report.render(facts_report.Report({}, ["den"], ["prose: types"], {}, known)))
    assert "3 of 4" in captured.get() and "den: Jasper" in captured.get()


@pytest.mark.slow
@pytest.mark.model
def test_the_demos_facts_lie_in_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the six episodes. A cache that forgets what is old knows none of them."""
    from tierkv.study.model import load_smollm2

    model, tokenizer = load_smollm2()
    episodes = load_episodes()[:2]
    forgotten = ask(model, tokenizer, [ZEROS], episodes, lambda *_: None)
    assert (forgotten[EXACT_CACHE].facts, forgotten["zeros"].facts) == (8, 0)
    monkeypatch.setattr(facts_report, "load_episodes", lambda: episodes)
    report = facts_report.run(plan(["k3v2"], None, None, quick=True), model, tokenizer, lambda *_: None)
    assert list(report.forms) == [EXACT_CACHE, "k3v2", "kivi-g32"]
    assert all(one.facts_asked == 8 for one in report.forms.values())
    assert report.forms[EXACT_CACHE].facts == 8
    assert (
        report.forms["k3v2"].facts >= 7
    )  # 24 of 24 are asked for at its bits; the machine's rounding may cost one
