"""DeepSpeed's buckets: what its keys, and their defaults, hold ready for sending."""

from __future__ import annotations

import math

from shardtune.core.send_buckets import SendBuckets
from shardtune.parallel.deepspeed.deepspeed_fields import ZeRO

DEFAULTS = SendBuckets()
SUB_GROUP = 1e9
"""DeepSpeed's default of `sub_group_size`."""
SIZES = (10_000_000, 20_000_000, 50_000_000, 100_000_000, 200_000_000, 500_000_000)
"""Elements that are proposed for a bucket; the last is DeepSpeed's default."""
SENT_WIDTH = 2
"""Bytes of an element on its way."""


def buckets_of(zero: ZeRO) -> SendBuckets:
    """The buffers that these settings make DeepSpeed hold."""
    weights = zero.stage == 3
    # DeepSpeed overlaps by itself at stage 3 alone, where one buffer serves.
    overlap = weights if zero.overlap_comm is None else zero.overlap_comm
    buffers = 2 if overlap and not weights else 1
    groups = SUB_GROUP if zero.sub_group_size is None else zero.sub_group_size
    return SendBuckets(
        reduce=zero.reduce_bucket_size or DEFAULTS.reduce,
        buffers=0 if zero.contiguous_gradients is False else buffers,
        lasting=weights,
        gather=zero.allgather_bucket_size or DEFAULTS.gather,
        live=_given(zero.stage3_max_live_parameters, DEFAULTS.live),
        prefetch=_given(zero.stage3_prefetch_bucket_size, DEFAULTS.prefetch),
        persistent=zero.stage3_param_persistence_threshold if weights else 0,
        most_persistent=_given(zero.stage3_model_persistence_threshold, math.inf),
        updated=groups if weights else math.inf,
        overlap=overlap,
    )


def sized_buckets(zero: ZeRO, size: float) -> ZeRO:
    """With buckets that are as large as the links need, and overlap, where nothing is said: a
    smaller one takes less memory and leaves less to send when the last gradient is there."""
    elements = next((each for each in SIZES if each * SENT_WIDTH >= size), SIZES[-1])
    wanted: dict[str, int | bool] = {"reduce_bucket_size": elements, "overlap_comm": True}
    if zero.stage in (1, 2):
        wanted["allgather_bucket_size"] = elements
    if zero.stage == 3:
        wanted["stage3_prefetch_bucket_size"] = elements
    open_keys = {key: value for key, value in wanted.items() if getattr(zero, key) is None}
    return zero.model_copy(update=open_keys)


def _given(value: int | None, default: float) -> float:
    return default if value is None else value
