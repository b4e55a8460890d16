"""The HTTP server answers whatever else is stuck, and only reads."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tierkv.daemon.http import MAX_CLIENTS, HttpServer, Verdict, loop_verdict
from tierkv.errors import ConfigError
from tierkv.protocol import PROTOCOL_VERSION


class Known:
    """A source whose answers the test sets; `gate` holds /status back."""

    def __init__(self) -> None:
        self.verdict = Verdict()
        self.admitting = Verdict()
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Semaphore(0)

    def metrics(self) -> bytes:
        return b"tierkv_epoch 3\n"

    def health(self) -> Verdict:
        return self.verdict

    def ready(self) -> Verdict:
        return self.admitting

    def status(self) -> dict[str, object]:
        self.inside.release()
        self.gate.wait(10)
        return {"epoch": 3, "config": {"hbm": 4096}}


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
def server(known: Known) -> Iterator[HttpServer]:
    server = HttpServer(known)
    yield server
    known.gate.set()
    server.close()


def get(server: HttpServer, path: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.url + path, method=method), timeout=5
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_it_listens_on_loopback_on_a_free_port(server: HttpServer) -> None:
    assert server.host == "127.0.0.1"
    assert server.port > 0


def test_each_route_answers(server: HttpServer) -> None:
    assert get(server, "/metrics") == (200, "tierkv_epoch 3\n")
    assert json.loads(get(server, "/status")[1]) == {"epoch": 3, "config": {"hbm": 4096}}
    assert get(server, "/ready")[0] == 200
    assert json.loads(get(server, "/version")[1])["protocol"] == PROTOCOL_VERSION
    assert get(server, "/nothing")[0] == 404


def test_bad_health_is_503_with_its_reason(server: HttpServer, known: Known) -> None:
    assert get(server, "/health") == (200, '{"ok":true,"reason":""}')
    known.verdict = Verdict("the mover thread has ended")
    assert get(server, "/health") == (503, '{"ok":false,"reason":"the mover thread has ended"}')


def test_draining_is_healthy_but_not_ready(server: HttpServer, known: Known) -> None:
    known.admitting = Verdict("draining")
    assert (get(server, "/health")[0], get(server, "/ready")[0]) == (200, 503)


def test_health_answers_while_another_handler_is_stuck(server: HttpServer, known: Known) -> None:
    known.gate.clear()
    stuck = threading.Thread(target=get, args=(server, "/status"))
    stuck.start()
    assert known.inside.acquire(timeout=5)
    assert get(server, "/health")[0] == 200
    assert stuck.is_alive()
    known.gate.set()
    stuck.join()


def test_a_flood_of_stuck_requests_is_turned_away_instead_of_taking_threads(
    server: HttpServer, known: Known
) -> None:
    known.gate.clear()
    stuck = [threading.Thread(target=get, args=(server, "/status")) for _ in range(MAX_CLIENTS)]
    for thread in stuck:
        thread.start()
    for _ in stuck:
        assert known.inside.acquire(timeout=5)
    assert get(server, "/status")[0] == 503
    known.gate.set()
    for thread in stuck:
        thread.join()
    assert get(server, "/status")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(server: HttpServer, method: str) -> None:
    assert get(server, "/status", method)[0] == 501


def test_a_head_request_gets_no_body(server: HttpServer) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    connection.request("HEAD", "/metrics")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Content-Length"), answer.read()) == (200, "15", b"")
    connection.close()


def test_a_source_that_raises_is_a_500_and_the_next_request_works(server: HttpServer, known: Known) -> None:
    known.verdict = None  # type: ignore[assignment]
    assert get(server, "/health")[0] == 500
    known.verdict = Verdict()
    assert get(server, "/health")[0] == 200


def test_a_taken_port_is_a_clear_error(server: HttpServer, known: Known) -> None:
    with pytest.raises(ConfigError, match=f"http_port = {server.port}.*--http-port"):
        HttpServer(known, port=server.port)


def test_a_closed_server_listens_no_more(known: Known) -> None:
    server = HttpServer(known)
    server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url + "/health", timeout=2)


@pytest.mark.parametrize(
    ("tick_age", "mover_alive", "mover_busy", "attach_alive", "said"),
    [
        (9.0, True, 0.0, True, "the loop has not ticked for 9.0 s"),
        (0.1, False, 0.0, True, "the mover thread has ended"),
        (0.1, True, 61.0, True, "61 s on one move"),
        (0.1, True, 0.0, False, "the attach thread has ended"),
    ],
)
def test_health_names_the_part_that_is_stuck_or_dead(
    tick_age: float, mover_alive: bool, mover_busy: float, attach_alive: bool, said: str
) -> None:
    assert loop_verdict(0.1, True, 0.0, True).ok
    verdict = loop_verdict(tick_age, mover_alive, mover_busy, attach_alive)
    assert not verdict.ok
    assert said in verdict.reason
