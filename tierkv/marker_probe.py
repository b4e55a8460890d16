"""How a chat template's markers are found: render small conversations, and see which tokens stand around a text.

A text is replaced by several others that begin and end differently. Tokens before it that all renderings share do
not depend on it, nor on how a tokenizer joins its first character with what comes before; and so after it. What
stands between two texts, but for what stands after the first where no message follows, opens the second's message.
Rendering is `chat_render`'s: where a template drops tool calls or answers, their plain forms are found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tierkv.chat_messages import ToolCall, Turn
from tierkv.chat_render import REGIONS, Renderer
from tierkv.markers import Marker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]

_TEXTS = ("Kestrels fly", "9 lamps burn.", "(why not)", '"so it is"', "what, then?", "Zinc: 40%")
_NAMES = ("find_it", "Book9", "weather", "turn_X", "_lock")

_JSON = frozenset('"{')

_SYSTEM, _USER, _ASSISTANT = (Turn(role, _TEXTS[0]) for role in ("system", "user", "assistant"))
_CALL = Turn("assistant", "", (ToolCall("probe0000", _NAMES[0], json.dumps({"of": "x"})),))
_TOOL = Turn("tool", _TEXTS[0], call_id="probe0000", name=_NAMES[0])

# The role whose opening is wanted, a conversation, and which message of it.
_CASES: tuple[tuple[str, tuple[Turn, ...], int], ...] = (
    ("user", (_USER, _ASSISTANT, _USER), 0),
    ("user", (_USER, _ASSISTANT, _USER), 2),
    ("user", (_SYSTEM, _USER), 1),
    ("assistant", (_USER, _ASSISTANT, _USER), 1),
    ("assistant", (_USER, _CALL, _TOOL, _ASSISTANT), 3),
    ("tool", (_USER, _CALL, _TOOL), 2),
    ("system", (_SYSTEM, _USER), 0),
)


class _Around(NamedTuple):
    """Tokens of a conversation; `[:start]` stand before a message's text whatever it is, `[stop:]` after it."""

    tokens: Tokens
    start: int
    stop: int

    @property
    def before(self) -> Tokens:
        return self.tokens[: self.start]

    @property
    def after(self) -> Tokens:
        return self.tokens[self.stop :]


def learn(tokenizer: PreTrainedTokenizerBase) -> list[Marker]:
    """The markers of the tokenizer's chat template.

    Raises:
        ValueError: nothing opens a user's message, or an assistant's, or it is the same.
    """
    probe = _Probe(tokenizer)
    found = probe.openings()
    for role in ("user", "assistant"):
        if not found.get(role):
            raise ValueError(
                f"the chat template has nothing that opens a message of the {role}: label tokens by Session.label"
            )
    markers = {tokens: REGIONS[role] for role, some in found.items() for tokens in some}
    call = probe.call(found["assistant"])
    if call:
        markers.setdefault(call, REGIONS["tool_calls"])
    return [Marker(tokens, region) for tokens, region in markers.items()]


class _Probe:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self._added = set(tokenizer.get_added_vocab().values())

    def openings(self) -> dict[str, list[Tokens]]:
        """By role, the one that keeps what two roles share first; as short as tells it from the other roles'."""
        raw: dict[str, list[Tokens]] = {"user": [], "assistant": [], "tool": [], "system": []}
        for role, turns, index in _CASES:
            raw[role].append(self._opening(turns, index))
        raw["assistant"] += [self._answer(turns) for turns in ((_USER,), (_USER, _CALL, _TOOL))]
        bos = self._tokenizer.bos_token_id
        if bos in {tokens[0] for tokens in raw["assistant"] if tokens}:
            bos = None  # it opens every message
        taken: set[Tokens] = set()
        found: dict[str, list[Tokens]] = {}
        for role, some in raw.items():
            cut = {self._from_shown(tokens[1:] if tokens[:1] == (bos,) else tokens) for tokens in some}
            cut = {tokens for tokens in map(self._to_quote, cut) if self._tells(tokens)} - taken
            found[role] = [
                o for o in sorted(cut) if not any(o != other and _within(other, o) for other in cut)
            ]
            taken |= cut
        return {
            role: sorted({self._shorten(o, [p for r in found if r != role for p in found[r]]) for o in some})
            for role, some in found.items()
        }

    def call(self, openings: Sequence[Tokens]) -> Tokens:
        """What opens a call in an assistant's message, if anything. Bare JSON is one only right after its opening."""
        text, call = self._around((_USER, _ASSISTANT), 1), self._around((_USER, _CALL), 1)
        if text is None or call is None:
            return ()
        own = self._from_shown(call.before[_common(text.before, call.before) :])
        if not own:
            return ()
        count = 0
        while count < len(own) and own[count] in self._added:
            count += 1
        if count:
            return own[:count]
        if not _JSON & set(self._text(own[0])):
            plain = self._to_quote(own)
            return plain if self._tells(plain) else ()
        starts = [_find_last(opening, call.before) for opening in openings]
        return call.before[max(starts) :] if max(starts) >= 0 else ()

    # Inside ---------------------------------------------------------------------------------------------------

    def _opening(self, turns: tuple[Turn, ...], index: int) -> Tokens:
        """What opens message `index`; nothing where the template refuses the conversation or drops the message."""
        here = self._around(turns, index)
        if here is None or index == 0:
            return here.before if here else ()
        before, alone = self._around(turns, index - 1), self._around(turns[:index], index - 1)
        if before is None or alone is None:
            return ()
        gap = here.tokens[before.stop : here.start]
        return gap[_common(gap, alone.after) :] or gap

    def _answer(self, turns: tuple[Turn, ...]) -> Tokens:
        """What the template puts after the last message when an answer is asked for."""
        asked, alone = (self._around(turns, len(turns) - 1, answer) for answer in (True, False))
        return () if asked is None or alone is None else asked.after[_common(asked.after, alone.after) :]

    def _around(self, turns: tuple[Turn, ...], index: int, answer: bool = False) -> _Around | None:
        found: list[Tokens] = []
        for turn in _variants(turns[index]):
            try:
                text = self._renderer.text([*turns[:index], turn, *turns[index + 1 :]], answer)
            except ValueError:
                return None
            found.append(tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))
        first, others = found[0], found[1:]
        start = min(_common(first, other) for other in others)
        stop = len(first) - min(_common(first[::-1], other[::-1]) for other in others)
        return _Around(first, start, stop) if start < stop else None

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _tells(self, tokens: Tokens) -> bool:
        """Blanks and brackets alone are no marker: texts have them too."""
        return any(token in self._added or any(map(str.isalpha, self._text(token))) for token in tokens)

    def _from_shown(self, tokens: Tokens) -> Tokens:
        """From the first added token on, or the first that is no blank: the text before may join those to its end."""
        added = (tokens[i:] for i, token in enumerate(tokens) if token in self._added)
        shown = (tokens[i:] for i, token in enumerate(tokens) if self._text(token).strip())
        return next(added, None) or next(shown, ())

    def _to_quote(self, tokens: Tokens) -> Tokens:
        """Up to JSON, in which names and ids would follow."""
        stops = (i for i, token in enumerate(tokens) if i and _JSON & set(self._text(token)))
        return tokens[: next(stops, len(tokens))]

    def _shorten(self, opening: Tokens, others: Sequence[Tokens]) -> Tokens:
        """The shortest beginning that no other role's opening has, if it is an added token, or one and a word.

        What follows may change: Llama's system message begins with a date.
        """
        if any(opening[: len(other)] == other for other in others):
            return opening
        count = 1
        while count < len(opening) and any(opening[:count] == other[:count] for other in others):
            count += 1
        while count < len(opening) and self._text(opening[count]).isalpha():
            count += 1
        word = opening[1:count]
        whole = opening[0] not in self._added or not all(
            token in self._added or self._text(token).isalpha() for token in word
        )
        return opening if whole else opening[:count]


def _variants(turn: Turn) -> list[Turn]:
    """The same message with other texts, or with other names of its call."""
    if not turn.calls:
        return [turn._replace(text=text) for text in _TEXTS]
    return [turn._replace(calls=(turn.calls[0]._replace(name=name),)) for name in _NAMES]


def _common(one: Tokens, other: Tokens) -> int:
    """Tokens that both begin with."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _within(part: Tokens, whole: Tokens) -> bool:
    return _find_last(part, whole) >= 0


def _find_last(part: Tokens, whole: Tokens) -> int:
    places = range(len(whole) - len(part), -1, -1)
    return next((place for place in places if whole[place : place + len(part)] == part), -1)


__all__ = ["learn"]
