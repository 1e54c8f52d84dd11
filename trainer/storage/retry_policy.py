"""How long servers are waited for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """Seconds."""

    connect: float = 10.0
    """For a connection."""
    silence: float = 30.0
    """Without a byte of an answer."""
    first: float = 15.0
    """For the first answer of a server to this process: most likely its address is wrong."""
    total: float = 300.0
    """For one request with all its retries: a store that restarts, a network that is away."""
    wait: float = 10.0
    """The longest wait between two retries."""


RETRIES = RetryPolicy()
