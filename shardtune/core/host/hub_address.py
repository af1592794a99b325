"""Whether this machine can reach the Hugging Face hub."""

from __future__ import annotations

from functools import cache
from socket import getaddrinfo
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_is_reachable() -> bool:
    """Whether the hub's host name can be looked up, or a proxy does it: where it can't, the hub's
    own client tries six times, in 24 seconds. Its offline mode asks nobody by itself."""
    from huggingface_hub import constants

    proxies = getproxies().keys() - {"no"}
    return constants.HF_HUB_OFFLINE or bool(proxies) or _has_address(constants.ENDPOINT)


def not_in_cache() -> str:
    """Why there is nothing of a hub that can't be reached."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT} has no address here, and it isn't in the cache"


@cache
def _has_address(url: str) -> bool:
    try:
        return bool(getaddrinfo(urlsplit(url).hostname, None))
    except OSError:
        return False
