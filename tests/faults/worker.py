"""A worker process that does what it is told: one JSON command a line on stdin, one JSON answer a line on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

import tierkv
from tests.faults import pages
from tierkv.errors import TierKVError


def main() -> None:
    client = tierkv.connect(sys.argv[1], timeout=20.0)
    sessions: list[tierkv.Session] = []
    seeds: list[int] = []

    def handle(
        do: str, at: int = 0, seed: int = 0, tokens: int = 0, steps: int = 0, wide: bool = False
    ) -> Any:
        if do == "open":
            sessions.append(client.open(pages.WIDE if wide else pages.SMALL, "wide" if wide else "small"))
            seeds.append(seed)
            return len(sessions) - 1
        session = sessions[at]
        if do == "step":
            pages.step(client, session, seeds[at], tokens, steps)
        elif do == "begin":
            session.begin(tokens)
        elif do == "finish":  # what `begin` laid out
            pages.write(client, session, seeds[at], session.horizon, session.length)
            session.commit()
            session.end()
        elif do == "check":
            return pages.check(client, session, seeds[at])
        elif do == "epoch":
            return client.epoch
        elif do == "scribble":  # writes without end
            session.begin(tokens)
            print(json.dumps({"ok": session.length}), flush=True)
            while True:
                pages.write(client, session, seeds[at], 0, session.length)
        return session.length

    print(json.dumps({"ok": client.epoch}), flush=True)
    for line in sys.stdin:
        try:
            answer = {"ok": handle(**json.loads(line))}
        except TierKVError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)
    client.close()


if __name__ == "__main__":
    main()
