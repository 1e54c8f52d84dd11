"""A link of a certain delay and speed to a server on this machine, in a process of its own."""

import asyncio
import contextlib
import multiprocessing
import socket
import sys
import time
from collections.abc import Iterator

_CHUNK = 128 * 1024


@contextlib.contextmanager
def slow_link(port: int, *, delay: float = 0.020, speed: float = 60e6) -> Iterator[int]:
    """Give a port of this machine behind which the server at another port is farther away.

    Args:
        port: the server's.
        delay: seconds from a byte of the server to the client, added to what this machine needs.
        speed: bytes a second from the server to the client, for each connection.
    """
    # Started anew: a process that was forked after threads ran may stand still.
    context = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    process = context.Process(target=_serve, args=(listener, port, delay, speed), daemon=True)
    process.start()
    try:
        yield listener.getsockname()[1]
    finally:
        process.terminate()
        process.join()
        listener.close()


def _serve(listener: socket.socket, port: int, delay: float, speed: float) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_accept(listener, port, delay, speed))


async def _accept(listener: socket.socket, port: int, delay: float, speed: float) -> None:
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    links = set()
    while True:
        client, _ = await loop.sock_accept(listener)
        link = asyncio.create_task(_link(client, port, delay, speed))
        links.add(link)
        link.add_done_callback(links.discard)


async def _link(client: socket.socket, port: int, delay: float, speed: float) -> None:
    loop = asyncio.get_running_loop()
    server = socket.socket()
    for end in (client, server):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with client, server:
        await loop.sock_connect(server, ("127.0.0.1", port))
        ways = [
            asyncio.create_task(_carry(client, server, 0.0, float("inf"))),
            asyncio.create_task(_carry(server, client, delay, speed)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _carry(source: socket.socket, sink: socket.socket, delay: float, speed: float) -> None:
    """Copy bytes; each arrives `delay` after it was sent, and not before the link has carried the last."""
    loop = asyncio.get_running_loop()
    # What is on its way: as much as the link holds, and some more.
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=32)

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not data:
                return
            await loop.sock_sendall(sink, data)

    deliverer = asyncio.create_task(deliver())
    free = 0.0
    try:
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, _CHUNK):
                now = time.monotonic()
                free = max(free, now) + len(data) / speed
                await under_way.put((free + delay, data))
            await under_way.put((0.0, b""))
            await deliverer
    finally:
        deliverer.cancel()


if __name__ == "__main__":
    sys.exit("this is a part of other benchmarks: run python -m benchmarks.storage")
