"""An HTTP server with the delay and speed of a slow link, in a separate process; uses little CPU time."""

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

DELAY = 0.020  # Seconds from a request to the first byte of the response.

SPEED = 60e6  # Bytes per second of each connection.

_CHUNK = 256 * 1024


@contextmanager
def slow_server(size: int) -> Iterator[str]:
    """Serve `size` bytes for every path that ends in .jpg, and 404 for others; yield the address."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.stdin.close()
        process.wait()


async def _handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
    clock = asyncio.get_running_loop().time
    try:
        while request := await reader.readuntil(b"\r\n\r\n"):
            method, path, _ = request.split(b" ", 2)
            is_image = path.endswith(b".jpg")
            ready = clock() + DELAY
            length = len(body) if is_image else 0
            status = b"200 OK" if is_image else b"404 Not Found"
            head = b'HTTP/1.1 %b\r\nContent-Length: %d\r\nETag: "x"\r\n\r\n' % (status, length)
            await asyncio.sleep(DELAY)
            writer.write(head)
            for at in range(0, length if method == b"GET" else 0, _CHUNK):
                writer.write(body[at : at + _CHUNK])
                await writer.drain()
                await asyncio.sleep(ready + min(at + _CHUNK, length) / SPEED - clock())
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _serve(size: int) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (1024, 768)).save(buffer, "JPEG")
    # A readable image; the padding in its scan has no marker.
    body = buffer.getvalue()[:-2] + bytes(range(1, 255)) * (size // 254 + 1)
    body = body[: size - 2] + b"\xff\xd9"
    server = await asyncio.start_server(lambda r, w: _handle(r, w, body), "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)  # a normal exit would print a traceback for each open connection


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
