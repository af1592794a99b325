import sys, tempfile, logging
from tests.ranks import on_ranks
def go(world, folder, mode):
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    import shardtune.models.speed as sp
    import shardtune.models.lora as lo
    from shardtune.job import LoRA, ModelSection, TrainSection
    from shardtune.models.blueprint import ModelBlueprint
    from shardtune.strategies import FSDP
    from tests.engines.test_recompute import SETUP, step
    c = nn.Module.compile
    nn.Module.compile = lambda l: c(l, backend="aot_eager")
    if "norec" in mode: sp.recompute = lambda *a: None
    if "noq" in mode: lo.quicken = lambda *a: None
    full = "full" if "full" in mode else "none"
    bp = ModelBlueprint(ModelSection(name=folder), LoRA(rank=4), TrainSection(precision="fp32", kernels="compiled", gradient_checkpointing=full))
    try:
        with FSDP().build(bp, SETUP, world) as e:
            for n in range(2):
                r = e.step(step(n)); r.loss
            return "ok", dict(counters["stats"])
    except Exception as x:
        return "failed", type(x).__name__, dict(counters["stats"])
if __name__ == "__main__":
    from tests.models.families import write
    f = tempfile.mkdtemp(); write(f, "llama")
    for m in sys.argv[1:]: print(m, on_ranks(2, go, f, m)[0], flush=True)
