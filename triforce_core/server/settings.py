"""Settings of the server."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from triforce_core.requests.answer.reasoning import AS_TEMPLATE, OFF, ON
from triforce_offload.errors import UsageError
from triforce_offload.units import parse_bytes

_ORIGIN = re.compile(r"https?://[^/\s*@?#]+")
# Names of models leave it out, and clients may write it.
SUFFIX = ".gguf"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server. Raises UsageError for invalid values.

    host, port: the address to listen on; a host other than this machine requires an `api_key`
    api_key: the key that clients must send
    name: the model name that clients use
    queue: the number of requests that may wait for the engine; further requests are rejected
    max_body: the maximum size of a request, in bytes or as text such as "32MiB"
    reasoning: whether models reason before they answer, "on" or "off"; "auto" leaves it to the chat
        template, and requests may set it too
    contexts: the number of conversations, besides the current one, whose KV stays in host memory
    allow_origins: the origins whose pages may use the server through a browser, separated by
        commas, such as "http://localhost:3000"
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    name: str = "model"
    queue: int = 16
    max_body: int = 32 << 20
    contexts: int = 2
    reasoning: str = AS_TEMPLATE
    allow_origins: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_body", parse_bytes(self.max_body))
        for name, least, most in (("port", 0, 65535), ("queue", 1, 10**6), ("contexts", 0, 1000)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise UsageError(f"{name} must be {least} to {most}, got {value!r}")
        if self.reasoning not in (AS_TEMPLATE, ON, OFF):
            raise UsageError(f"reasoning must be auto, on or off, got {self.reasoning!r}")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"an origin is a scheme, a host and maybe a port, such as "
                    f"http://localhost:3000, got {origin!r}"
                )
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty")
        if self.api_key is None and not _is_this_machine(self.host):
            raise UsageError(
                f"a server on {self.host} can be reached from elsewhere: give it an --api-key"
            )

    @property
    def origins(self) -> list[str]:
        """The allowed origins."""
        return [each.strip().lower() for each in self.allow_origins.split(",") if each.strip()]


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
