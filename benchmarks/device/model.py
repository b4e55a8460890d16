"""A random model of 8B geometry that generates over a daemon on the GPU, beside transformers' own cache."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tierkv.benchmarks.device.machine import Machine, memory_folder
from tierkv.benchmarks.device.table import Row

CHILD = "daemon"
PR_SET_PDEATHSIG = 1
START_SECONDS = 60.0
VOCABULARY = 2_048
STEPS_COMPARED = 8
DIFFERENCE = 0.05
"""Of the largest logit: bfloat16 has 8 bits, and both sides round at each of a few layers."""


def run(machine: Machine) -> Iterator[Row]:
    with memory_folder(machine.sizes.host) as folder:
        daemon = subprocess.Popen(
            [*machine.command, "--child", CHILD, folder, str(hbm_bytes(machine)), str(machine.sizes.host)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert daemon.stdout is not None
            said = daemon.stdout.readline()
            yield Row(
                "a daemon serves on the GPU",
                said.strip() or "it ended at its start",
                said.startswith("ready"),
            )
            if said.startswith("ready"):
                yield from generate(machine, Path(folder))
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(START_SECONDS)


def hbm_bytes(machine: Machine) -> int:
    """Twice what the longest context takes exactly."""
    page = machine.sizes.page
    a_layer = page.page_bytes // page.num_layers * machine.sizes.model_layers
    tokens = max(machine.sizes.contexts) + machine.sizes.decode_steps
    return max(64 << 20, 2 * a_layer * (-(-tokens // page.page_tokens)))


def child(folder: str, hbm: str, host: str) -> int:
    """The daemon, until SIGTERM."""
    import sys

    from tierkv.daemon import service

    end_with_parent()
    sys.argv = ["tierkv", "--state-dir", folder, "--hbm", hbm, "--host", host, "--device", "cuda:0"]
    service.main()
    return 0


def end_with_parent() -> None:
    """SIGTERM for this process when the one that started it is gone: a part that is stopped leaves no daemon."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def build(machine: Machine) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    page, share = machine.sizes.page, machine.sizes.share
    heads = page.num_kv_heads * share
    config = LlamaConfig(
        hidden_size=heads * page.head_dim, intermediate_size=3 * heads * page.head_dim,
        num_hidden_layers=machine.sizes.model_layers, num_attention_heads=heads,
        num_key_value_heads=page.num_kv_heads, head_dim=page.head_dim, vocab_size=VOCABULARY,
        max_position_embeddings=2 * max(machine.sizes.contexts), eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(machine.device):
        return LlamaForCausalLM(config).to(getattr(torch, page.dtype)).eval()


def generate(machine: Machine, folder: Path) -> Iterator[Row]:
    from transformers import DynamicCache

    import tierkv

    model = build(machine)
    attached = tierkv.attach(model)
    with tierkv.connect(folder, timeout=START_SECONDS) as client:
        mapped = client.mapped().tensor
        where = "in this process's memory" if mapped is None else f"as a tensor on {mapped.device}"
        yield Row("its pool is mapped", where, mapped is not None and mapped.device == machine.device)
        for context in machine.sizes.contexts:
            prompt = torch.randint(1, VOCABULARY, (1, context), device=machine.device)
            session = attached.open(client)
            cache = tierkv.TieredCache(session, attention="triton")
            try:
                ours, seconds = decode(machine, model, cache, prompt)
                theirs, peer_seconds = decode(machine, model, DynamicCache(), prompt)
            finally:
                cache.close()
            largest = float(theirs.abs().max())
            apart = float((ours - theirs).abs().max()) / largest
            yield Row(
                f"logits after {context:,} tokens", f"{apart:.4f} of the largest apart", apart < DIFFERENCE
            )
            rate, peer = machine.sizes.decode_steps / seconds, machine.sizes.decode_steps / peer_seconds
            yield Row(
                f"decode at {context:,} tokens", f"{rate:.0f} tokens/s beside {peer:.0f} of DynamicCache"
            )


def decode(machine: Machine, model: Any, cache: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Logits of the first steps, and seconds of all of them but those; each step's token is given, not chosen."""
    tokens = torch.randint(
        1,
        VOCABULARY,
        (machine.sizes.decode_steps + STEPS_COMPARED,),
        generator=torch.Generator().manual_seed(1),
    )
    logits = []
    with torch.inference_mode():
        for start in range(0, prompt.shape[1], 1024):
            model(prompt[:, start : start + 1024], past_key_values=cache, use_cache=True, logits_to_keep=1)
        for step, token in enumerate(tokens.to(machine.device)):
            if step == STEPS_COMPARED:
                machine.synchronize()
                begun = time.perf_counter()
            out = model(token.reshape(1, 1), past_key_values=cache, use_cache=True)
            if step < STEPS_COMPARED:
                logits.append(out.logits[0, -1].float())
        machine.synchronize()
    return torch.stack(logits), time.perf_counter() - begun
