"""A server that gives prepared bytes as answers, be they HTTP or not."""

import socket
import threading
import time
from contextlib import suppress

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


class Server:
    """Gives prepared answers, the last again and again; counts connections and requests."""

    def __init__(self) -> None:
        self.answers = [PLAIN]
        self.closes = False
        """Whether each connection is closed after an answer, without a word."""
        self.after = b""
        """What comes a moment after each answer, though nobody asked."""
        self.together: threading.Barrier | None = None
        """Requests wait for each other here before they are answered."""
        self.connections = 0
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/x"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            request = b""
            while more := connection.recv(65536):
                request += more
                if b"\r\n\r\n" not in request:
                    continue
                self.requests.append(request)
                request = b""
                if self.together is not None:
                    self.together.wait(10)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                connection.sendall(answer)
                if self.after:
                    time.sleep(0.03)
                    connection.sendall(self.after)
                end = answer.find(b"\r\n\r\n")
                head = answer[: max(end, 0)]
                if self.closes or (end >= 0 and (b"Content-Length" not in head or b"close" in head)):
                    return

    def stop(self) -> None:
        self._listener.close()
