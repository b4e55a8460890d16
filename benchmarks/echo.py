"""`python -m tierkv.benchmarks.echo ENDPOINT`: sends back what it gets; nothing that answers over pyzmq can do less."""

from __future__ import annotations

import sys

import zmq


def main() -> None:
    """Until SIGTERM."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(sys.argv[1])
    print("ready", flush=True)
    while True:
        router.send_multipart(router.recv_multipart())


if __name__ == "__main__":
    main()
