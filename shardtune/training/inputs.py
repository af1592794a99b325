"""What a run reads: everything that can be wrong before a rank exists.

The launcher opens it before it starts ranks, so this module imports neither engines nor adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardtune.config.job import Job
from shardtune.config.model_rules import check_model
from shardtune.core.files.cache import cache_dir
from shardtune.core.model.divisible_experts import require_divisible_experts
from shardtune.core.model.family_support import require_isolation
from shardtune.core.model.kind import require_trained_family
from shardtune.core.model.parallel_plan import expert_count, expert_widths, require_divisible
from shardtune.core.model.quantized_size import require_whole_blocks
from shardtune.core.world import World
from shardtune.data.dataset import PreparedData
from shardtune.data.loader import Loader
from shardtune.data.prepare import prepare
from shardtune.models.load import check_fits_data, check_weights
from shardtune.models.model_files import ModelFiles
from shardtune.training.scheduled_tasks import ScheduledTask, open_tasks
from shardtune.training.watched_metric import require_watchable


@dataclass(frozen=True)
class Inputs:
    """What a run reads: everything that can be wrong before the first process is started."""

    model: ModelFiles
    data: PreparedData
    tasks: tuple[ScheduledTask, ...] = ()


def open_inputs(job: Job, *, quiet: bool) -> Inputs:
    """Finds the model, reads and tokenises the data; both are cached, so a second call is quick.

    This happens before the ranks join: whoever comes first does the work, the others wait at a
    file lock, and no collective can time out meanwhile.
    """
    model = open_model(job)
    tasks = open_tasks(job, model)
    data = prepare(
        job.data,
        model.tokenizer,
        model.stop_ids,
        cache=cache_dir(),
        quiet=quiet,
        kind=model.kind,
        own_tokens=job.model.add_tokens,
    )
    require_watchable(job, [each.name for each in data.eval], tasks)
    return Inputs(model, data, tasks)


def open_model(job: Job) -> ModelFiles:
    """The model's files, if the job can be done with this model. What is refused here the planner
    refuses, too."""
    model = ModelFiles.of_job(job)
    paired = model.kind == "encoder_decoder"
    target = job.data.longest_target if paired else None
    require_trained_family(model.own_config, job.model.name)
    check_model(job, model.kind)
    require_isolation(model.config.model_type, packing=job.data.packing is True)
    check_fits_data(model, job.data.sequence_length, target)
    check_weights(model, job.adapter)
    require_cuttable(job, model.config)
    return model


def require_cuttable(job: Job, config: Any) -> None:
    """Refuses a model that the strategy can't cut into its stages, slices or experts."""
    mesh = job.strategy.mesh(int(job.launch.processes))
    staged = mesh.size_of("pipeline") > 1  # a strategy that is still to be chosen never is
    require_divisible(config, mesh, job.strategy.layout().pipelining if staged else None)
    if mesh.size_of("expert") > 1:
        import torch

        from shardtune.models.model_files import auto_class

        with torch.device("meta"):  # an expert tensor of a large mixture has 30 GB
            model = auto_class(config).from_config(
                config, trust_remote_code=job.model.trust_remote_code
            )
        family = config.get_text_config().model_type
        require_divisible_experts(model, family, expert_count(config), mesh.size_of("expert"))
        if job.model.quantization == "nf4":
            require_whole_blocks(expert_widths(config))


def open_loader(job: Job, inputs: Inputs, world: World) -> Loader:
    """This rank's share of every step. Ranks that hold parts of one model share their rows."""
    mesh = job.strategy.mesh(world.size)
    mesh.require(world.size)
    return Loader(
        inputs.data,
        job.data,
        seed=job.train.seed,
        global_batch=job.train.global_batch,
        micro_batch=int(job.train.micro_batch),
        rank=mesh.data_rank(world.rank),
        ranks=mesh.data_ranks,
        pad_id=inputs.model.tokenizer.pad_token_id or 0,
        epochs=job.train.epochs,
        earlier_ends=job.train.earlier_ends,
    )


def count_steps(job: Job, data: Loader) -> int:
    """How many steps the run has, which only the data can tell where the job counts epochs."""
    return job.train.steps or data.total_steps(job.train.epochs or 1.0)
