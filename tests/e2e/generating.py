"""A worker process that runs `model.generate` over a daemon, told what to do like `tests.faults.worker`.

With `stop_at`, it says so in the middle of a generation and goes on when it is told to: at a step's boundary (a
logits processor) or inside a forward (a hook, after the step's pages were taken and before its K/V are committed).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.faults.harness import Process


class Generator(Process):
    """`Process` of this module's `main`, which imports transformers for seconds and then serves many tests.

    Each test connects it to a state directory of its own and disconnects it. `model` changes `tiny_models.SHAPE`.
    """

    def __init__(self, **model: Any) -> None:
        super().__init__("-m", "tests.e2e.generating", json.dumps(model))
        self.owed = 0
        """Answers that did not come yet."""

    def connect(self, state_dir: Path) -> None:
        self.ask("connect", state_dir=str(state_dir))

    def tell(self, do: str, **how: Any) -> None:
        assert self.process.stdin is not None
        self.owed += 1
        self.process.stdin.write(json.dumps({"do": do, **how}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        answer = json.loads(self.line())
        self.owed -= 1
        return answer

    def ask(self, do: str, **how: Any) -> Any:
        self.tell(do, **how)
        return self.answer()


def main() -> None:
    import torch

    import tierkv
    from tests.tierkv.tiny_models import build, expected, greedy, prompt

    def say(answer: object) -> None:
        print(json.dumps(answer), flush=True)

    model = build("llama", **json.loads(sys.argv[1]))
    caches: dict[str, tierkv.TieredCache] = {}
    client: tierkv.Client | None = None

    def inputs(
        lengths: list[int] | None = None, seed: int = 1, ids: list[list[int]] | None = None
    ) -> dict[str, Any]:
        return {"input_ids": torch.tensor(ids)} if lengths is None else prompt(*lengths, seed=seed)

    def generate(
        cache: str, new: int, ladder: str = "tiered", stop_at: int = 0, inside: bool = False, **prompt: Any
    ) -> list[list[int]]:
        given = inputs(**prompt)
        if cache not in caches:
            assert client is not None
            sessions = [tierkv.attach(model).open(client, ladder=ladder) for _ in given["input_ids"]]
            caches[cache] = tierkv.TieredCache(sessions)
        calls = 0

        def count(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                say(f"step {stop_at}")
                sys.stdin.readline()
            return None if inside else arguments[1]  # a processor returns the scores

        hook = model.model.layers[1].register_forward_hook(count) if inside else None
        options = {} if inside else {"logits_processor": [count]}
        try:
            return greedy(model, given, caches[cache], max_new_tokens=new, **options).tolist()
        finally:
            if hook is not None:
                hook.remove()

    for line in sys.stdin:
        how = json.loads(line)
        match how.pop("do"):
            case "connect":
                client = tierkv.connect(how["state_dir"], timeout=60.0)
                say(client.epoch)
            case "disconnect":
                caches.clear()
                client = None if client is None else client.close()
                say(True)
            case "generate":
                say(generate(**how))
            case "expected":
                new = how.pop("new")
                say(expected(model, inputs(**how), max_new_tokens=new).tolist())
            case "horizons":
                say([session.horizon for session in caches[how["cache"]].sessions])
            case "epoch":
                say(client.epoch if client is not None else 0)


if __name__ == "__main__":
    main()
