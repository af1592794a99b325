"""What `accelerate launch` tells its own library through the environment.

To a rank it is torchrun: RANK, WORLD_SIZE and MASTER_ADDR are the same. Further variables switch
its plug-ins on, and transformers reads them, too: with FSDP's it leaves the weights out on all
ranks but one. Here the job says how the work is spread, so they are taken away.
"""

from __future__ import annotations

from collections.abc import MutableMapping

PLUGINS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


def drop_plugins(environment: MutableMapping[str, str]) -> list[str]:
    """Takes the plug-ins away; returns the names of those that were switched on."""
    given = {name: environment.pop(name) for name in PLUGINS if name in environment}
    return [name for name, value in given.items() if value.lower() in ("1", "true", "yes", "on")]
