"""Traces as files hold them, and what a replay measures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tierkv.chat_tokenizer import SIZE, tokenizer
from tests.tierkv.tiny_models import build
from tierkv.chat_messages import read_messages
from tierkv.chat_render import Renderer
from tierkv.errors import ConfigError
from tierkv.study.replay import TraceReport, fitting, full_logits, private_memory, quality
from tierkv.study.replay_report import ReplayReport, render, totals
from tierkv.study.traces import Trace, choose, load_traces

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(folder: Path, text: str) -> Path:
    file = folder / "traces"
    file.write_text(text)
    return file


def test_a_file_may_hold_traces_one_trace_or_the_messages_of_one(tmp_path: Path) -> None:
    tau = [{"task_id": 3, "trial": 1, "messages": MESSAGES}, {"messages": MESSAGES}]
    named = {"name": "greeting", "messages": MESSAGES, "tools": [{"name": "wave"}]}
    lines = "\n".join(map(json.dumps, MESSAGES))
    for text, want in [
        (json.dumps(tau), [Trace("task 3, trial 1", MESSAGES), Trace("1", MESSAGES)]),
        (json.dumps(named), [Trace("greeting", MESSAGES, [{"name": "wave"}])]),
        (json.dumps(MESSAGES), [Trace("0", MESSAGES)]),
        (json.dumps([MESSAGES, MESSAGES]), [Trace("0", MESSAGES), Trace("1", MESSAGES)]),
        (lines, [Trace("0", MESSAGES)]),
        ("\n\n".join(map(json.dumps, tau)), [Trace("task 3, trial 1", MESSAGES), Trace("1", MESSAGES)]),
    ]:
        assert load_traces(write(tmp_path, text)) == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds no trace"),
        ("7", "trace 0: no messages"),
        ('[{"messages": []}]', "trace 0: no messages"),
        (
            '[{"messages": [{"role": "user", "content": "x"}, {"role": "robot"}]}]',
            "trace 0: message 1 has the role",
        ),
        ('[{"messages": [{"role": "user", "content": "x", "region": "attic"}]}]', "'attic' does not exist"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_with_the_place(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_traces(write(tmp_path, text))
    assert said in str(refused.value)


def test_traces_are_chosen_by_number_and_by_count() -> None:
    traces = [Trace(str(index), MESSAGES) for index in range(5)]
    assert [number for number, _ in choose(traces, [], None)] == [0, 1, 2, 3, 4]
    assert [number for number, _ in choose(traces, [], 2)] == [0, 1]
    assert [trace.name for _, trace in choose(traces, [4, 1], None)] == ["4", "1"]
    with pytest.raises(ConfigError, match="no trace 5: the file holds 0 to 4"):
        choose(traces, [5], None)


def test_a_trace_beyond_the_models_context_loses_its_last_messages_and_says_how_many() -> None:
    model = build("llama", vocab_size=SIZE, max_position_embeddings=300)
    turns = read_messages(
        [{"role": "system", "content": "s" * 100}, *MESSAGES, {"role": "user", "content": "x" * 200}]
    )
    report = TraceReport(0, "x")
    kept, lengths = fitting(model, Renderer(tokenizer()), turns, report)
    assert kept == turns[:3]
    assert lengths[0] == 100 + len("system\n\n") + 2  # the two marks around a message are a token each
    assert (report.messages_cut, report.tokens_cut) == (1, 200 + len("user\n\n") + 2)
    with pytest.raises(ValueError, match="the first message has"):
        fitting(
            build("llama", vocab_size=SIZE, max_position_embeddings=50), Renderer(tokenizer()), turns, report
        )


def test_the_full_arm_gives_the_logits_of_one_forward() -> None:
    model = build("llama", vocab_size=SIZE, max_position_embeddings=1024)
    tokens = torch.randint(4, SIZE, (1, 600), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(tokens).logits[0, -64:]
    torch.testing.assert_close(full_logits(model, tokens[0].tolist(), 64), want, atol=1e-4, rtol=1e-4)


def test_kl_is_that_of_full_from_tiered_in_nats_and_top1_counts_agreement() -> None:
    half = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    other = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
    found = quality(half, other)
    assert found.tokens == 2
    assert found.kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2)
    assert found.top1 == 0.5  # equals go to the first, which the other does not prefer
    assert quality(half, half + 3.0).kl == pytest.approx(0.0, abs=1e-7)  # logits, not probabilities


def test_private_memory_grows_with_what_a_process_allocates() -> None:
    """Two processes of their own: in this one, memory that other tests left is freed at any moment."""
    sizes = []
    for held in (0, 64 << 20):
        code = f"held = bytearray(b'x' * {held}); print('ready', flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None and child.stdout.readline()
            sizes.append(private_memory(child.pid))
            child.communicate(b"\n")
    assert sizes[1] - sizes[0] > 0.9 * (64 << 20)
    assert private_memory(None) > 0
    assert private_memory(2**30) == 0


def test_the_table_has_a_line_a_trace_and_tells_what_failed_and_what_was_cut() -> None:
    from rich.console import Console

    good = TraceReport(
        4, "task 4", messages=20, messages_cut=3, tokens=5000, tokens_cut=700, budget_bytes=10 << 20,
        hbm_peak_bytes=9 << 20, pages={"hbm": 10, "quantized": 200, "host": 5}, seconds=12.5, quality=quality(
            torch.zeros(2, 3), torch.zeros(2, 3)), worker_memory=1 << 20,
    )  # fmt: skip
    bad = TraceReport(5, "task 5", error="OutOfCapacity: full", worker_memory=3 << 20)
    report = ReplayReport("tiny", 0.2, None, [good, bad], totals([good, bad]))
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(report))
    text = console.export_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("4 "))
    assert line.split() == [
        "4",
        "20",
        "5,000",
        "9.00",
        "10.00",
        "10",
        "200",
        "5",
        "0",
        "12.5",
        "0.0000",
        "100.0%",
    ]
    assert "trace 5 (task 5) failed: OutOfCapacity: full" in text
    assert "its last 3 messages (700 tokens) are left out" in text
    assert "1 of 2" in text and "90%" in text
    assert "1 MiB after the first trace, 3 MiB after the last" in text
