"""One thread is one, also where a library has taken as many as the environment says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WATCHED = """
import time
import torch
from shardtune.compat.one_thread import one_thread

inputs, weight = torch.ones(128, 256), torch.ones(256, 256)
for _ in range(20):  # on two threads, so that both are there
    torch.nn.functional.linear(inputs, weight)
time.sleep(0.5)  # the other thread waits busily for more, at first
with one_thread():
    begun, begun_all = time.thread_time(), time.process_time()
    while (alone := time.thread_time() - begun) < 1.0:  # a fast processor needs more products
        torch.nn.functional.linear(inputs, weight)
    all_threads = time.process_time() - begun_all
print(torch.get_num_threads(), (all_threads - alone) / alone)
"""


@pytest.mark.process
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_no_other_thread_takes_part() -> None:
    """On ARM the Arm Compute Library would have a second one compute half of it."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    threads, by_others = done.stdout.split()
    assert int(threads) == 2
    assert float(by_others) < 0.1  # 0.7 on ARM where torch alone is told
