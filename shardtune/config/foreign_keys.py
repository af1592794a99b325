"""Words of other tools, in the place of which a job has others."""

_TRACK = "here it is track: a list of tensorboard, wandb, mlflow, trackio and csv"
_WANDB = "here it is track: [{type: wandb, "
OTHERS_KEYS = {
    "r": "here it is adapter.rank",
    "lora_r": "here it is adapter.rank",
    "lora_alpha": "here it is adapter.alpha",
    "lora_dropout": "here it is adapter.dropout",
    "target_modules": "here it is adapter.targets",
    "lora_target_modules": "here it is adapter.targets",
    "load_in_4bit": "here it is model.quantization: nf4",
    "load_in_8bit": "here it is model.quantization: int8",
    "attn_implementation": "here it is model.attention",
    "base_model": "here it is model.name",
    "model_name_or_path": "here it is model.name",
    "datasets": "here it is data.train, a list",
    "sequence_len": "here it is data.sequence_length",
    "max_length": "here it is data.sequence_length",
    "max_seq_length": "here it is data.sequence_length",
    "max_seq_len": "here it is data.sequence_length",
    "cutoff_len": "here it is data.sequence_length",
    "sample_packing": "here it is data.packing",
    "lr": "here it is train.learning_rate",
    "lr_scheduler": "here it is train.schedule",
    "lr_scheduler_type": "here it is train.schedule",
    "warmup": "here it is train.warmup_steps, or train.warmup_ratio",
    "num_epochs": "here it is train.epochs",
    "num_train_epochs": "here it is train.epochs",
    "max_steps": "here it is train.steps",
    "batch_size": (
        "here it is train.global_batch, rows of a step over all ranks, or train.micro_batch, rows "
        "of a forward pass"
    ),
    "micro_batch_size": "here it is train.micro_batch",
    "per_device_train_batch_size": "here it is train.micro_batch",
    "gradient_accumulation_steps": (
        "it follows from train.global_batch: rows of a step, over all ranks and micro-batches"
    ),
    "bf16": "here it is train.precision; `bf16: true` at the top or in `train` is understood",
    "fp16": "here it is train.precision; `fp16: true` at the top or in `train` is understood",
    "torch_dtype": "here it is train.precision",
    "sharding_strategy": "here it is strategy.sharding: full or hybrid; torch's names, too",
    "output_dir": "here it is save.directory",
    "save_steps": "here it is save.every",
    "eval_steps": "here it is evaluate.every",
    "load_best_model_at_end": "here it is save.best: {metric: loss}",
    "metric_for_best_model": "here it is save.best.metric, and train.early_stop.metric",
    "greater_is_better": "here it is save.best.goal, min or max; `auto` knows which",
    "early_stopping_patience": "here it is train.early_stop.patience, counted in evaluations",
    "early_stopping_threshold": "here it is train.early_stop.min_delta",
    "early_stopping": "here it is train.early_stop: {metric: loss, patience: 3}",
    "save_total_limit": "here it is save.keep; the best is kept besides (save.best)",
    "rehearse": "it is called train.preflight now",
    "report_to": _TRACK,
    "logger": _TRACK,
    "use_wandb": "here it is track: [wandb]",
    "use_tensorboard": "here it is track: [tensorboard]",
    "use_mlflow": "here it is track: [mlflow]",
    "logging_dir": "here it is track: [{type: tensorboard, directory: DIR}]",
    "wandb": f"{_WANDB}project: NAME}}]",
    "wandb_project": f"{_WANDB}project: NAME}}]",
    "wandb_entity": f"{_WANDB}entity: NAME}}]",
    "wandb_name": f"{_WANDB}name: NAME}}]",
    "wandb_run_name": f"{_WANDB}name: NAME}}]",
    "wandb_mode": f"{_WANDB}mode: offline}}]",
    "wandb_run_id": "not needed with track: [wandb]; a resumed run goes on in its own run of W&B",
    "run_name": f"{_TRACK}, each with a name: {{type: wandb, name: NAME}}",
    "mlflow_tracking_uri": "here it is track: [{type: mlflow, tracking_uri: URI}]",
    "mlflow_experiment_name": "here it is track: [{type: mlflow, experiment: NAME}]",
}
"""What keys are called in the configurations that people bring, and where it is here."""

_RANKS = "here it is launch.processes, one for each GPU; `auto` counts them"
OTHERS_PATHS = {
    "save.steps": "here it is save.every",
    "save.interval": "here it is save.every",
    "save.strategy": "here it is save.every: a number of steps",
    "evaluate.steps": "here it is evaluate.every",
    "evaluate.interval": "here it is evaluate.every",
    "evaluate.strategy": "here it is evaluate.every: a number of steps",
    "launch.num_gpus": _RANKS,
    "launch.gpus": _RANKS,
    "launch.num_processes": _RANKS,
    "launch.nproc_per_node": _RANKS,
    "launch.nodes": "give it to the command: `train JOB --nodes 2 --node-rank 0 --head ...`",
}
"""The same, where a word means something else in another section."""

_FLASH = (
    "write sdpa: with `shardtune[flash]` installed it is FlashAttention 4 on GPUs that can have it"
)
OTHERS_VALUES = {
    "flash_attention_3": _FLASH,
    "flash_attention_4": _FLASH,
    "qlora": "QLoRA is adapter: {type: lora} on model: {quantization: nf4}",
    "fp8-base": "write `model: {quantization: fp8}` and leave train.precision at bf16",
}
"""The same of values, and of our own earlier ones."""
