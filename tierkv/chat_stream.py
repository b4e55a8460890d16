"""Text as a model generates it: whole characters at once, an end on request, and an iterator over a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import torch
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

REPLACEMENT = "\ufffd"
"""What an incomplete character decodes to."""


class Stopped(StoppingCriteria):  # type: ignore[misc]
    """Ends a generation after the token at hand once `event` is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: object, **more: object) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


class Pieces(BaseStreamer):  # type: ignore[misc]
    """Hands the text of one sequence on as soon as it is whole characters; all pieces together are the text."""

    def __init__(self, decode: Callable[[list[int]], str], told: Callable[[str], None]) -> None:
        self._decode, self._told = decode, told
        self._ids: list[int] | None = None
        self._said = 0

    def put(self, value: torch.Tensor) -> None:
        if self._ids is None:  # the first call brings the prompt
            self._ids = []
            return
        self._ids += value.reshape(-1).tolist()
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            self._say(text)

    def end(self) -> None:
        self._say(self._decode(self._ids or []))

    def _say(self, text: str) -> None:
        if len(text) > self._said:
            piece, self._said = text[self._said :], len(text)
            self._told(piece)


def stream_pieces(run: Callable[[Callable[[str], None], threading.Event], object]) -> Iterator[str]:
    """What `run` tells, from a thread of its own. `run` gets a function that takes pieces, and an event that asks it to
    end: it is set when the iterator is closed, which then waits for `run`. What `run` raises is raised here.
    """
    pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    stop = threading.Event()
    failure: list[BaseException] = []

    def work() -> None:
        try:
            run(pieces.put, stop)
        except BaseException as error:
            failure.append(error)
        finally:
            pieces.put(None)

    thread = threading.Thread(target=work, name="tierkv-conversation", daemon=True)
    thread.start()
    try:
        while (piece := pieces.get()) is not None:
            yield piece
    finally:
        stop.set()
        thread.join()
    if failure:
        raise failure[0]


__all__ = ["Pieces", "Stopped", "stream_pieces"]
