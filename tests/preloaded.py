"""What ranks would otherwise import one by one: seconds each, in every test.

Imported by the process that ranks are forked from. It must have one thread only: a forked process
has none but the one that forked it, and would wait for the others for ever.
"""

from __future__ import annotations

import gc
import os
import warnings
from importlib.util import find_spec

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import transformers.models.llama.modeling_llama  # noqa: F401

import tests.numerics.test_factorisations  # noqa: F401
from shardtune.kernels.measure_matmul import widen_slow_products

torch.set_num_threads(1)
widen_slow_products()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for package in ("deepspeed", "bitsandbytes"):
        if find_spec(package):
            __import__(package)

# A rank's collector has no need to look through all of that, nor to write into shared pages.
gc.collect()
gc.freeze()
