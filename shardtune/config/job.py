"""The job: everything that a run is told, typed, frozen and documented.

Defaults live here and nowhere else. The text under a field is its description in the JSON Schema
that `shardtune schema` prints. `auto` is a value: `config/auto.py` replaces each one once, in a new
job, and says why.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from shardtune.config.trackers import TrackerList
from shardtune.core.job_section import Section
from shardtune.core.layout import Layout
from shardtune.core.lr_schedule import ScheduleKind
from shardtune.core.one_cycle import OneCycle
from shardtune.core.setup import (
    Bits,
    Loss,
    OptimizerSetup,
    Precision,
    Quantization,
    Recompute,
)
from shardtune.parallel import DEFAULT, Strategy, spelt_out

Auto = Literal["auto"]
Kernels = Literal["eager", "compiled"]
LARGEST_COUNT = 10**12
"""Of whatever is counted: more steps or tokens than any run has, and far from where 64 bits end."""

Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
NotNegative = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
NotNegativeNumber = Annotated[float, Field(ge=0)]


def _unless_said(kind: str) -> Discriminator:
    """Chooses by `type`; a section that has none is of this kind."""

    def chosen(value: Any) -> str:
        given = value.get("type", kind) if isinstance(value, dict) else getattr(value, "type", kind)
        return str(given)

    return Discriminator(chosen)


class ModelSection(Section):
    """Which model to start from."""

    name: Annotated[str, Field(min_length=1)]
    """A built-in name (`shardtune models list`), a local folder, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    attention: Literal["auto", "sdpa", "flex_attention", "flash_attention_2", "eager"] = "auto"
    """Which attention implementation of transformers computes the forward pass. `auto` takes the
    best that the model's family has everywhere: `sdpa`, else `eager`. With `sdpa` a GPU keeps
    packed documents apart without a mask, where the family allows it."""
    add_tokens: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Special tokens that the tokenizer shall have besides its own, such as `<|im_start|>`. Where
    the embedding has no spare rows for them it grows, and with it the output head; a new row starts
    as the mean of the others. An adapter trains them through `modules_to_save`."""
    stop_tokens: Auto | tuple[str, ...] = "auto"
    """Tokens that end an answer. `auto` takes the tokenizer's and the generation config's."""
    quantization: Quantization = "none"
    """How the linear layers of the frozen model are stored: `nf4` takes half a byte a weight (with
    its scales quantized too), `int8` one; both are restored for each matmul. `fp8` (e4m3) is also
    multiplied in 8 bits, twice as fast on GPUs that do so (Ada, Hopper and later), and takes two
    bytes, one for each direction; it needs `train.precision: bf16` and `strategy: ddp`. The output
    head and what an adapter trains stay as they are. Needs an adapter, because such weights can't
    be trained."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository ships. Read it before you allow it."""

    @property
    def attn_implementation(self) -> str | None:
        """As transformers is told it; of a family that we don't know it chooses itself."""
        return None if self.attention == "auto" else self.attention


class NoAdapter(Section):
    """Train all weights."""

    type: Literal["none"] = "none"


class LoRA(Section):
    """Train a low-rank correction of each chosen linear layer; the model itself stays as it is."""

    type: Literal["lora"] = "lora"
    rank: Positive = 16
    """Columns of the correction. More of them learn more and cost more memory."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Strength: the correction is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that is dropped in training."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers to adapt, or every one but the output head."""
    variant: Literal["plain", "dora", "rslora", "pissa"] = "plain"
    """`dora` trains the length of each row apart from its direction; `rslora` multiplies by
    alpha / sqrt(rank), so that high ranks keep their strength; `pissa` starts from the strongest
    directions of the weights instead of from nothing."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole beside the adapters, and saved with them, such as
    `embed_tokens` and `lm_head` after new tokens were added."""


class IA3(Section):
    """Train one factor for each output of the keys and values and each input of the MLP's last
    layer: a few thousand numbers; the model itself stays as it is."""

    type: Literal["ia3"] = "ia3"
    targets: Auto | tuple[str, ...] = "auto"
    """Names of the linear layers to scale; `auto` knows the common families."""
    feedforward: Auto | tuple[str, ...] = "auto"
    """Those of the targets whose input is scaled, not their output."""


Adapter = Annotated[LoRA | IA3 | NoAdapter, Field(discriminator="type")]

Format = Literal["instruction", "chat", "completion", "pretokenized", "source_target"]


class Columns(Section):
    """Which columns of the files hold what. What a format doesn't use is left alone."""

    instruction: str = "instruction"
    """What is asked (format `instruction`)."""
    input: str = "input"
    """Further material to the question; may be missing or empty (format `instruction`)."""
    output: str = "output"
    """The answer to learn (format `instruction`)."""
    system: str = "system"
    """A system prompt; may be missing (formats `instruction` and `chat`)."""
    messages: Auto | str = "auto"
    """The turns: `messages` or `conversations`, whichever is there (format `chat`)."""
    text: str = "text"
    """The text to learn (format `completion`)."""
    input_ids: str = "input_ids"
    """Token ids (format `pretokenized`)."""
    labels: str = "labels"
    """Target ids, -100 where not trained; may be missing (format `pretokenized`). For a model with
    an encoder: what its decoder has to write."""
    source: Auto | str = "auto"
    """What the encoder reads (format `source_target`). `auto` knows common names: `source`,
    `input`, `prompt`, `document`, `article`, `dialogue`, `question`."""
    target: Auto | str = "auto"
    """What the decoder has to write (format `source_target`). `auto` takes the name that goes with
    the source's: `target`, `output`, `completion`, `summary`, `highlights`, `answer`."""


class Separator(Section):
    """Documents of a text file are what stands between occurrences of a text."""

    separator: Annotated[str, Field(min_length=1)]
    """Such as `"\\n---\\n"`; it is no part of a document."""


class Source(Section):
    """One data set: a file, a saved `datasets` folder, or a hub id."""

    path: Annotated[str, Field(min_length=1)]
    """JSONL, JSON, CSV, Parquet, Arrow or text file (gzip, bz2 and zstd are unpacked), several by a
    pattern (`data/*.txt`) or in a folder, a folder saved by `datasets`, or a hub id."""
    format: Format
    """How a row is read."""
    name: Auto | Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "auto"
    """What reports call it; `auto` takes the file's name."""
    config: str | None = None
    """Which configuration of a hub id that has several (`load_dataset`'s `name`)."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Which split of a hub id or of a saved folder with several, or a slice: `train[:1%]`."""
    columns: Columns = Columns()
    """Which columns hold what, where they are called otherwise."""
    prefix: str = ""
    """Text before each source (format `source_target`): `summarize: `, for T5 knows its tasks by
    one."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """How an instruction becomes text: the tokenizer's chat template, or plain headings.
    `auto` takes the chat template where the tokenizer has one."""
    documents: Auto | Literal["file", "blank_line", "line"] | Separator = "auto"
    """What a document of a text file is: the whole file, what stands between blank lines or between
    occurrences of a separator, or a line. `auto` looks at the file, and what it takes is told."""
    overflow: Literal["truncate", "split", "drop"] = "truncate"
    """What becomes of a document longer than the sequence: its end is cut off, it is cut into
    several documents, or it is left out. Reported either way."""

    @property
    def label(self) -> str:
        """Its name, or what `auto` stands for: the file's name, in letters that a name may have."""
        if self.name != "auto":
            return self.name
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", PurePath(self.path).stem)
        return stem.lstrip("_.-")[:64] or "data"


class TrainSource(Source):
    """A data set to train on."""

    stop: Literal["required", "none"] = "required"
    """Whether documents have to end with a stop token. `none` trains a set in which none does: a
    model learns from it how to go on, not when to end. Rows of token ids that fill the sequence are
    a corpus cut into windows, and need no such word."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often its rows are seen in an epoch: 0.5 takes half of them (the other half the next
    time), 2 takes each twice."""


class EvalShare(Section):
    """Rows of the training sets that are held out, drawn by their content: the same ones when rows
    are added or reordered, and never one whose copy is trained."""

    share: Annotated[float, Field(gt=0, lt=1)]
    """About which part of the rows."""


class DataSection(Section):
    """What the model is trained and judged on."""

    train: Annotated[tuple[TrainSource, ...], Field(min_length=1)]
    """The data sets to train on."""
    eval: tuple[Source, ...] | EvalShare = ()
    """Held-out data sets, or `{share: 0.02}` of the training sets; each is reported by its own
    name."""
    sequence_length: Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = 1024
    """The longest row, in tokens; the longest source of a model with an encoder."""
    target_length: Auto | Annotated[int, Field(ge=8, le=LARGEST_COUNT)] = "auto"
    """The longest target of a model with an encoder (T5, BART), in tokens; `auto` is as many as
    `sequence_length`. A decoder alone has source and target in one row."""
    packing: Auto | bool = "auto"
    """Fill each row with several documents, kept apart in attention and positions. `auto` does so
    where the model's family keeps them apart, and else gives each document a row of its own."""
    shuffle: bool = True
    """Draw the documents in a random order, another each epoch; false keeps the files' order."""
    chat_template: str | None = None
    """A chat template for a tokenizer that has none, or in the place of its own: a Jinja file, or
    one of chatml, llama3, gemma, phi3, mistral, zephyr, alpaca, vicuna. It is saved with the
    result, and the token that ends its answers is a stop token."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do when rows can't be read: list them all and stop, or list them and go on."""
    control_tokens: Literal["refuse", "text", "token"] = "refuse"
    """What to do with a row whose own text holds a control token of the tokenizer (`<|im_end|>`,
    `</s>`): refuse it as a bad row, read it as ordinary text, or as that token. What the chat
    template writes, the job's `add_tokens` and an end-of-text token at the end of a text are not
    meant."""
    workers: Auto | Positive = "auto"
    """Processes that tokenise."""

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """The held-out data sets that have files of their own."""
        return () if isinstance(self.eval, EvalShare) else self.eval

    @property
    def longest_target(self) -> int:
        """`target_length`, or what `auto` stands for."""
        return self.sequence_length if self.target_length == "auto" else self.target_length

    @property
    def packs(self) -> bool:
        """Whether rows are packed; `auto` that nobody has resolved packs, and is checked."""
        return self.packing is not False


class AdamW(Section):
    """AdamW, with weight decay on matrices only."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """How much of the past the means of the gradient and of its square remember."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Keeps the division by the root of the mean square from blowing up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Share of a weight that is taken off in each step, times the learning rate."""
    bits: Bits = 32
    """Of each of the two means. 8 stores them block-wise, a byte a number and a scale for 256 of
    them: a quarter of the memory, slightly other steps. Needs `shardtune[quant]`."""
    paged: bool = False
    """Optimizer states, and the lower halves of split fp32 weights, lie in pinned CPU memory that
    the GPU reads and writes in place (host-mapped; bitsandbytes calls it paged): 10 bytes less a
    weight on the GPU, the same steps to the bit, and the way over the bus once a step. Where one
    GPU trains all weights in bf16."""

    def setup(self) -> OptimizerSetup:
        """The update rule as the engine is told it."""
        return OptimizerSetup(
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            bits=self.bits,
            host_mapped=self.paged,
        )


class SGD(Section):
    """Plain gradient descent. It shows errors of gradient scale that AdamW hides."""

    type: Literal["sgd"]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """How much of the last update goes into the next."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Share of a weight that is added to its gradient."""

    def setup(self) -> OptimizerSetup:
        """The update rule as the engine is told it."""
        return OptimizerSetup("sgd", momentum=self.momentum, weight_decay=self.weight_decay)


Optimizer = Annotated[
    Annotated[AdamW, Tag("adamw")] | Annotated[SGD, Tag("sgd")], _unless_said("adamw")
]


class WatchedMetric(Section):
    """A metric that the run measures on its way."""

    metric: Annotated[str, Field(min_length=1)] = "loss"
    """`loss`, `perplexity` or `accuracy` of all held-out sets together, `SET.loss` of one of them,
    or the name of a task (`evaluate.tasks`)."""
    goal: Auto | Literal["min", "max"] = "auto"
    """Whether less or more of it is better. `auto`: less loss and perplexity, more of anything
    else."""


class EarlyStop(WatchedMetric):
    """Ends a run that gets no better."""

    patience: Positive = 3
    """Evaluations in a row without an improvement after which the run ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """A change counts as an improvement if it is larger."""


class BestCheckpoint(WatchedMetric):
    """Writes the result from the best step."""


class TrainSection(Section):
    """How to train."""

    steps: Positive | None = None
    """Optimizer steps. Give this or `epochs`."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data. Give this or `steps`; with neither, one."""
    global_batch: Annotated[int, Field(ge=1, le=10**7)] = 16
    """Rows in one optimizer step over all ranks (packed rows where `packing` is on)."""
    micro_batch: Auto | Positive = "auto"
    """Rows in one forward pass on one rank. It changes memory and speed, never the result (but for
    the random numbers of dropout, where there is any). `auto`: on GPUs the fewest that are about as
    fast as any that fit, by the forecast; elsewhere up to 4,096 tokens."""
    learning_rate: Annotated[float, Field(gt=0, le=1e4)] = 2e-4
    """The highest rate of the schedule."""
    schedule: ScheduleKind = "cosine"
    """How the rate falls after the warmup. `one_cycle` rises and falls as torch's OneCycleLR, by
    the three numbers of `one_cycle`, and takes no `warmup_steps`."""
    one_cycle: OneCycle = OneCycle()
    """The shape of `schedule: one_cycle`."""
    warmup_steps: NotNegative = 0
    """Steps in which the rate rises from zero."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The same as a share of the run, rounded up. Give this or `warmup_steps`."""
    schedule_start: NotNegative = 0
    """The step after which the schedule begins: warmup and decay go from there to the end. Set by
    `--resume --restart-schedule`, when a run that came to its end is extended."""
    earlier_ends: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """The epochs after which a run that was extended had come to its end before. A step that was
    short there stays so, and the next begins with the row after it. Set by `--resume`."""
    precision: Auto | Precision = "auto"
    """Of the computation: `bf16` or `fp16` (mixed precision, the latter with loss scaling), or
    `fp32`. `auto` takes bf16 where the device is fast in it; else fp16 on a GPU and fp32 on a CPU.
    Weights that are trained are kept in fp32 in any case; how frozen ones are stored is
    `model.quantization`."""
    gradient_checkpointing: Auto | Recompute = "none"
    """Activation checkpointing: what the backward pass recomputes instead of keeping it. `none`
    keeps the result of every matmul (small operations between them are recomputed where layers are
    compiled), `mlp` drops the wide ones of the MLP, `most` keeps only attention, `full` nothing but
    each layer's input: least memory, about a third more time. `mlp` and `most` are for `ddp` and
    `fsdp`. `auto` takes the lowest level that fits into the memory, by the forecast, and sets
    `keep_layers` too."""
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    """What a rank may take of its GPU, in GiB: the forecast, and what is chosen by it, keep to it.
    Null: all that the GPU has."""
    keep_layers: NotNegative = 0
    """So many of the layers, the last ones, are exempt from `gradient_checkpointing: mlp` or
    `most`: memory that is left buys time."""
    offload_activations: bool = False
    """What the forward pass saves waits for the backward pass in pinned CPU memory, copied beside
    the computation: the GPU keeps about two layers of it. With `gradient_checkpointing: full` it is
    little; without, computing often waits for the link to the host. On a GPU, under
    `strategy: ddp`."""
    loss: Auto | Loss = "auto"
    """`fused` computes output head and loss together, in pieces: the logits of a micro-batch, often
    the largest thing of all, never exist at once. `auto` does so on a GPU."""
    kernels: Auto | Kernels = "auto"
    """`compiled` fuses the small operations of each layer (torch.compile, some 20 seconds once);
    `eager` runs each as transformers writes it. `auto` compiles on a GPU."""
    log_every: Positive = 1
    """Steps between two looks at what the device has computed: loss, norm and health are read and
    logged then, for every step since but the one that a GPU has only just been given, so that it
    need not wait. What a step shows, such as a gradient that is not finite, is told at the look.
    Before an evaluation, a checkpoint and the end there is one, too, at every step."""
    preflight: bool = True
    """Try the largest micro-batch, an evaluation and the disk before the first step, so that what
    doesn't fit shows at once and not hours later. It changes nothing that is computed."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Longer gradients are scaled down to this length; null never clips."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides order, initial adapters and dropout."""
    optimizer: Optimizer = AdamW()
    """The update rule."""
    early_stop: EarlyStop | None = None
    """Early stopping: ends the run when a metric gets no better. Null runs all steps."""
    on_nan: Literal["skip", "stop"] = "skip"
    """What to do when a gradient is not finite: leave the update out on every rank, or stop. The
    rank and the samples are named either way."""
    on_oom: Literal["stop", "reduce_micro_batch"] = "stop"
    """What to do when memory runs out: stop and say what to change, or go on from the last
    checkpoint with half the micro-batch, which changes nothing else. In the preflight of a new run
    one that the forecast has chosen is halved in any case, by our own launcher."""

    def warmup(self, steps: int) -> int:
        """Steps of warmup in a schedule over so many."""
        ratio = self.warmup_ratio
        return self.warmup_steps if ratio is None else math.ceil(steps * ratio)

    @property
    def compute_precision(self) -> Precision:
        """The precision of the computation, once `auto` is replaced."""
        assert self.precision != "auto"
        return self.precision

    @property
    def recompute(self) -> Recompute:
        """The level of activation checkpointing, once `auto` is replaced."""
        assert self.gradient_checkpointing != "auto"
        return self.gradient_checkpointing


class TaskEntry(Section):
    """A benchmark that is run while training, as `shardtune evaluate` runs it afterwards."""

    task: Annotated[str, Field(min_length=1)]
    """What `shardtune evaluate --task` takes: `METRIC=FILE.jsonl`, a task file (`tasks.yaml`), or a
    recipe, as `gsm8k=FILE`."""
    every: Auto | NotNegative = "auto"
    """Steps between two runs of it; 0 runs it only before and after. `auto` follows
    `evaluate.every`."""
    limit: Positive | None = None
    """Ask only the first rows. Null asks all of them."""
    shots: NotNegative | None = None
    """Examples before each question. Null: as the task says."""
    max_new_tokens: Positive | None = None
    """Longest answer. Null: as the task says."""


def _entries(value: object) -> object:
    """A task may be written as its name alone."""
    if not isinstance(value, list | tuple):
        return value
    return tuple({"task": each} if isinstance(each, str) else each for each in value)


class EvaluateSection(Section):
    """When the held-out sets are looked at, and how."""

    every: Auto | NotNegative = "auto"
    """Steps between evaluations; 0 looks only before and after. `auto` follows `save.every`."""
    tasks: Annotated[
        tuple[TaskEntry, ...],
        BeforeValidator(_entries, json_schema_input_type=list[str | TaskEntry]),
    ] = ()
    """Benchmarks of which the score is measured before, while and after training; an entry may be
    the task's name alone. Their questions are answered greedily, in batches, shared among the
    ranks."""
    batch_size: Positive = 16
    """Questions of a task that a rank answers at once."""
    allow_code: bool = False
    """Run code that the model writes, for tasks whose metric is `code`, in a sandbox."""
    samples: NotNegative = 3
    """Held-out prompts whose answers are shown before and after the run."""
    max_new_tokens: Positive = 96
    """Longest answer to those."""


class LocalLaunch(Section):
    """Start the processes on this machine."""

    type: Literal["local"] = "local"
    processes: Auto | Positive = "auto"
    """One per GPU; `auto` counts them, and starts one process where there is none."""
    threads: Auto | Positive = "auto"
    """Threads a process may use; `auto` divides the cores among the processes."""
    restarts: NotNegative = 3
    """How often the run is started again from its last checkpoint after a process died or hung. At
    the third failure in the same step it ends in any case."""
    patience: Annotated[float, Field(ge=1)] = 4.0
    """Seconds of silence inside a step (or 2.5 median steps, if that is more) after which a process
    counts as hung. The first step, compiling, evaluating and saving may take longer."""
    grace: Annotated[float, Field(gt=0)] = 30.0
    """Seconds after SIGTERM in which the step has to end and its checkpoint to be written."""
    rejoin: Annotated[float, Field(ge=0)] = 600.0
    """On several nodes: seconds that one may be missing, at the start or after it was lost, before
    the others give up."""

    def with_processes(self, count: int) -> LocalLaunch:
        return self.model_copy(update={"processes": count})


class RayLaunch(Section):
    """Run on Ray's workers: on a Ray that is started for this run, or on a cluster that is there.

    `save.directory` has to be on storage that all workers share."""

    type: Literal["ray"]
    workers: Auto | Positive = "auto"
    """Ranks; `auto` takes one for each GPU of the cluster."""
    use_gpu: Auto | bool = "auto"
    """Whether each worker gets a GPU; `auto` gives one where the cluster has any."""
    resources_per_worker: dict[str, NotNegativeNumber] = Field(default_factory=dict)
    """What else a worker is given, as Ray counts it: `{CPU: 4}`."""
    address: str | None = None
    """Of a Ray that is there: `auto` finds it, `ray://HOST:10001` connects to one elsewhere. Null
    starts one on this machine and stops it afterwards."""
    max_failures: NotNegative = 3
    """How often the run is started again from its last checkpoint after workers died."""
    dashboard: bool = False
    """Let a Ray that is started here serve its web page, on the loopback address."""
    storage: str | None = None
    """Where the run directory is copied at the end, result and checkpoints with it: any path that
    fsspec understands, such as `s3://bucket/run`."""
    threads: Auto | Positive = "auto"
    """Threads a worker may use; `auto` takes its CPUs."""

    @property
    def processes(self) -> Auto | int:
        """Ranks, by the name that they have under `type: local`."""
        return self.workers

    def with_processes(self, count: int) -> RayLaunch:
        return self.model_copy(update={"workers": count})


Launch = Annotated[
    Annotated[LocalLaunch, Tag("local")] | Annotated[RayLaunch, Tag("ray")], _unless_said("local")
]


class BackendTrainer(Section):
    """How Ludwig's trainer is spread."""

    use_gpu: Auto | bool = "auto"
    """As `launch.use_gpu`."""
    num_workers: Auto | Positive = "auto"
    """As `launch.workers`."""
    resources_per_worker: dict[str, NotNegativeNumber] = Field(default_factory=dict)
    """As `launch.resources_per_worker`."""
    strategy: Annotated[Strategy | None, BeforeValidator(spelt_out)] = None
    """As the section `strategy`."""


class Backend(Section):
    """What Ludwig calls the place where a job runs: another way to write `launch` and
    `strategy`."""

    type: Literal["ray", "local"]
    """As `launch.type`."""
    trainer: BackendTrainer = BackendTrainer()
    """What runs there."""


class SaveSection(Section):
    """What a run leaves behind."""

    directory: Annotated[str, Field(min_length=1)] = "runs/shardtune"
    """The run directory. One that holds a run is never overwritten without being told."""
    every: NotNegative = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: Positive = 2
    """Checkpoints that are kept; older ones are removed once a newer one is complete."""
    best: BestCheckpoint | None = None
    """Keep the checkpoint of the step with the best value of a metric besides those of `keep`, and
    write the result from it. Null writes the result from the last step."""
    background: bool = True
    """Copy the state to CPU memory and write the copy while training goes on. Each rank needs
    memory for its share of a checkpoint, from the first step on if `every` says so; false needs
    none, and trains on when all is written."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do when a checkpoint can't be written: say so and train on until the next one is due,
    or stop. The last checkpoint of a run has to succeed in any case."""
    trace: bool = False
    """Write `trace.jsonl`: after each step its loss, gradient norm and rate to the bit, and digests
    of samples, random numbers, weights and optimizer state. For proofs; it gathers the state."""


class Job(Section):
    """A fine-tuning run, described."""

    model: ModelSection
    adapter: Adapter = NoAdapter()
    """What is trained: all weights, or an adapter beside them."""
    data: DataSection
    train: TrainSection = TrainSection()
    strategy: Strategy = DEFAULT
    """How the work is spread over the ranks."""
    evaluate: EvaluateSection = EvaluateSection()
    launch: Launch = LocalLaunch()
    """Where the ranks are started."""
    backend: Backend | None = None
    """Ludwig's name for `launch` and `strategy`; give one or the other."""
    save: SaveSection = SaveSection()
    track: TrackerList = ()
    """Trackers that show the run's figures, each fed by a process of its own: none can slow, stop
    or change a run."""

    @property
    def trains(self) -> str:
        """What is trained, as people call it: the adapter's type, or `full fine-tune`."""
        return "full fine-tune" if isinstance(self.adapter, NoAdapter) else self.adapter.type

    def layout(self, ranks: int) -> Layout:
        """What the strategy declares, and where the optimizer's part of it lies."""
        found = self.strategy.layout()
        if self.maps_states_to_host(ranks):
            return replace(found, home={**found.home, "optim": "cpu"})
        return found

    def maps_states_to_host(self, ranks: int) -> bool:
        """Whether optimizer states lie in host-mapped memory. On several ranks it is refused."""
        rule = self.train.optimizer
        return isinstance(rule, AdamW) and rule.paged and self.splits_weights(ranks)

    def splits_weights(self, ranks: int) -> bool:
        """Whether fp32 weights are split: the model has their upper halves, the optimizer the lower
        ones. Where one rank trains all weights in bf16, which `auto` counts as until it is
        replaced; several would add up rounded gradients."""
        rule = self.train.optimizer
        return (
            self.strategy.capabilities.split_weights
            and isinstance(self.adapter, NoAdapter)
            and isinstance(rule, AdamW)
            and self.train.precision in ("bf16", "auto")
            and (rule.bits, ranks) == (32, 1)
        )
