"""A process that asks a plain ROUTER, and prints one line for each answer: `python plain_child.py URL`."""

import sys

import zmq


def main(url: str) -> None:
    """Ask until somebody ends this process."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(url)
        while True:
            dealer.send(b"row")
            print("answer" if dealer.recv() == b"row" else "wrong", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
