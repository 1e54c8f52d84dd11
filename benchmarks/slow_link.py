"""A TCP proxy with a given delay and speed, in a separate process."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

_CHUNK = 128 * 1024


@contextlib.contextmanager
def slow_link(port: int, *, delay: float = 0.020, speed: float = 60e6) -> Iterator[int]:
    """Start a proxy that simulates a slow link to the server at `port`; yield the proxy's port.

    Args:
        port: port of the server, on this machine.
        delay: additional seconds for bytes from the server to the client.
        speed: bytes per second from the server to the client, for each connection.
    """
    # A separate program with few imports: on a busy machine, importing torch takes longer than a client
    # waits. -P: do not import modules from the folder of this file.
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(port), str(delay), str(speed)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


async def _serve(port: int, delay: float, speed: float) -> None:
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
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
    """Copy bytes; each chunk arrives after `delay`, and after the previous one has been transmitted."""
    loop = asyncio.get_running_loop()
    # Chunks in transit: more than the link holds.
    in_transit: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=32)

    async def deliver() -> None:
        while True:
            due, data = await in_transit.get()
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
                await in_transit.put((free + delay, data))
            await in_transit.put((0.0, b""))
            await deliverer
    finally:
        deliverer.cancel()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("this module is used by other benchmarks: run python -m benchmarks.storage")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(int(sys.argv[1]), *map(float, sys.argv[2:])))
