"""The few numbers that are measured, not derived. Each says where it comes from.

*Fitted* means: by `python -m benchmarks.planner_accuracy --fit`, on half of the published
measurements; docs/benchmarks/planner_accuracy.md has the errors on the other half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardtune.core.units import GIB


@dataclass(frozen=True)
class MemoryConstants:
    """Bytes that no closed form gives."""

    plain_logit: float = 12.49
    """Bytes a logit at the loss: 16-bit logits, log-probabilities and their gradient in fp32, and
    the 16-bit gradient make 12. Fitted."""
    shifted_logit: float = 18.02
    """The same with an fp32 copy that is shifted by a token. Fitted."""
    sliced_logit: float = 16.0
    """The same as `plain` where tensor parallelism divides the vocabulary: log-probabilities are
    then made step by step (torch's loss_parallel), with one fp32 temporary more. Counted."""
    compiled_logit: float = 4.0
    """Logits and gradient in 16 bits, nothing between them. Counted."""
    chunked_logit: float = 2.67
    """16-bit logits stay; the fp32 work is on an eighth of them. Fitted."""
    widened_logit: float = 8.0
    """Logits and log-probabilities of all tokens in fp32; gradients take the latter's place, piece
    by piece. Counted."""
    fused_hidden: float = 4.0
    """Bytes a hidden number for a loss that never has the logits at once: what it reads and the
    gradient of that, in 16 bits. Counted."""
    fragmentation: float = 0.0575
    """What is lost between blocks in use, as a share of what comes and goes. Fitted."""
    mismatch: float = 0.631
    """Share of the layer's blocks that the loss can't use, or the other way round. Fitted."""
    stale: float = 1.0
    """Share of the gradients' blocks that the rest of the step can't use. Fitted."""
    variable: float = 1.17
    """Blocks cached for rows of other lengths, as a share of what comes and goes. Fitted."""
    context: float = 0.5 * GIB
    """CUDA's own memory and the kernels; ml-engineering measured 0.47 to 0.92 GiB."""
    own_context: float = 0.75 * GIB
    """The same for our own engines: measured with torch 2.11 on an H200."""
    collective: float = 0.15 * GIB
    """NCCL's buffers for each rank of a node; 1 to 2 GiB for eight by ml-engineering."""


@dataclass(frozen=True)
class TimeConstants:
    """What is the same for all GPUs: the host, and how often small operations pass over data."""

    launch: float = 22.52e-6
    """Seconds that the host takes to launch one operation. Fitted."""
    start: float = 3.06e-6
    """Seconds of a GPU that a kernel's start and end take, when not all of it is busy. Fitted."""
    graph_gap: float = 0.6e-6
    """Seconds between two kernels of a CUDA graph. Fitted."""
    masks: float = 2.0
    """Passes over an adapter's input that its dropout mask takes as long as. Fitted."""
    sharpness: float = 4.195
    """How sharply the slower of host and GPU decides: infinity would be a plain maximum. Fitted."""
    joint_sharpness: float = 2.135
    """The same where slices of a layer wait for each other four times in it. Fitted."""
    straggling: float = 0.0249
    """How much longer the slowest host of a layer's slices takes, for each slice more. Fitted."""
    eager_passes: float = 1.007
    fused_passes: float = 1.686
    compiled_passes: float = 0.854
    """Passes of small operations over their data, against what counting them gives. Fitted."""
    narrow: float = 1.4
    """How much longer the narrow products of an adapter take than small operations over the same
    bytes. Set by hand after our own steps on an H200."""
    unaligned: float = 0.3992
    """Speed of a product whose width is no multiple of eight. Fitted."""
    fp8_trained_rows: float = 1.0
    """Speed of an 8-bit product against a 16-bit one where trained weights are scaled row by row:
    torchtitan's four rows of it, 99, 100, 105 and 106, are no faster than those in 16 bits beside
    them, 95, 96, 101 and 102 (the scaling takes what the product saves)."""
    cpu_bytes: float = 80e9
    """Bytes a second that a node's processors pass over while they update weights. DeepSpeed
    reports more than 4 s for Llama-2-7B on a node with four A100, which is 52e9 at least."""
    host: float = 0.87
    """Of the link to the host, what pinned copies reach: 54.6 of 63 GB/s beside an H200."""
    host_mapped: float = 0.72
    """Of such a copy, what a kernel reaches that reads and writes CPU memory at once. From one
    step beside an H200, 306 ms longer than without: 39 of 55 GB/s in either direction, if the
    update itself takes 10 ms (which was not timed)."""
    disk_read_gbs: float = 5.6
    disk_write_gbs: float = 4.3
    """Of one good NVMe disk (DeepSpeed's DeepNVMe tutorial)."""


@dataclass(frozen=True)
class Chip:
    """A GPU type: what a training step sees of what the data sheet promises."""

    ceiling: float
    """Of the peak, what the best product of matrices reaches (MAMF, by ml-engineering); a measured
    one counts instead where there is a profile."""
    matmul: float
    """Of that ceiling, what products reach in a step. Fitted."""
    attention: float
    """Of the peak, for FlashAttention's forward pass over the pairs that a token sees. Fitted."""
    sdpa: float
    """The same for what torch picks."""
    memory: float
    """Of the memory's bandwidth, for small operations. Fitted."""
    fp8: float = 1.73
    """Speed of an 8-bit product against a 16-bit one. Fitted on the H100."""
    fp8_rows: float = 1.9
    """The same for frozen weights with a scale for each row, as our engines multiply them: 1,553
    beside 808 TFLOP/s on an H200."""
    link: float = 0.8
    """Of the link between GPUs. Fitted."""
    network: float = 0.8
    """Of the network between nodes; ml-engineering: expect 80 % of what is advertised."""
    clash: float = 0.25
    """How much of the shorter is lost when sending and computing overlap: 0 nothing, 1 all.
    Fitted."""


MEMORY = MemoryConstants()
TIME = TimeConstants()

UNIT_LESS = 0.9
"""`fp8_rows` of a GPU that can't multiply 8-bit numbers: they are converted to 16 bits each time.
A guess."""

A100 = Chip(0.869, 0.9464, 0.3832, 0.382, 0.801, fp8_rows=UNIT_LESS, link=1.0, clash=0.2426)
H100 = Chip(0.803, 0.942, 0.219, 0.61, 0.655, link=0.997, clash=0.667)
H200 = replace(H100, matmul=0.90, memory=0.76, link=0.935, clash=0.599)
"""Set by hand after our own steps: their products ran at 690 to 735 TFLOP/s (the card is at its
power limit), their small kernels at 3.5 to 4.2 TB/s."""
POWER_LIMITED = replace(
    H100, matmul=1.0, attention=0.26, memory=0.322, fp8=2.0, link=1.0, clash=0.093
)
"""torchtitan's H100 with slower memory and 500 W."""
# GeForce cards run above the clock that their data sheet's peak is for. Their driver doesn't let
# them write to each other: without NVLink they send over the host, 3 GB/s, and computing waits.
RTX30 = Chip(1.05, 0.983, 0.8, 0.8, 0.75, fp8_rows=UNIT_LESS, link=0.096, clash=0.887)
RTX40 = Chip(1.05, 1.0, 0.8, 0.8, 0.75, link=0.416, clash=0.211)
ADA_WORKSTATION = replace(RTX40, matmul=0.3, link=0.2)
"""Set by hand after the two runs of RTX 6000 Ada cards that there are, of which none was held back:
two cards with two rows each and four with three reach the same 14 % of their peak, so it isn't the
link that holds them. They come out at +4 and +5 %."""
WORKSTATION = replace(RTX30, link=0.2)
"""The same silicon in cards that may write to each other over PCIe. Set by hand after
three runs of A5000s, of which none was held back: they come out at +28, -9 and -8 %."""
V100 = Chip(0.8, 0.9, 0.3, 0.3, 0.75, fp8_rows=UNIT_LESS)
"""Not fitted: no published run has all its settings."""
MI250 = replace(H100, fp8_rows=UNIT_LESS)
"""As other cards of AMD, but older than FP8."""

CHIPS: dict[str, Chip] = {
    "V100": V100,
    "A100": A100,
    "H100": H100,
    "H100-96GB-500W": POWER_LIMITED,
    "H200": H200,
    "RTX3": RTX30,
    "RTX4": RTX40,
    "RTX6000Ada": ADA_WORKSTATION,
    "A40": WORKSTATION,
    "MI250": MI250,
}
"""By how the GPU's name begins; the longest beginning counts."""
LIKE = {
    "P100": "V100",
    "T4": "V100",
    "A10": "A40",
    "A30": "A40",
    "A5000": "A40",
    "A6000": "A40",
    "L4": "RTX4",
    "RTX": "RTX4",
    "GH200": "H200",
    "H20": "H100",
    "B": "H200",
    "GB": "H200",
    "MI": "H100",
}
"""GPUs of which there are too few measurements: the nearest that has some."""


MEASURED = {
    "A100": "A100",
    "A5000": "A5000",
    "H100": "H100",
    "H200": "H200",
    "RTX30": "RTX3090",
    "RTX40": "RTX4090",
    "RTX6000Ada": "RTX6000Ada",
}
"""GPUs whose own runs stand behind their entry, by how the name begins; the card of these runs."""


def beginning_of(gpu: str) -> str:
    """The entry of CHIPS for a GPU; one that we don't know at all is taken for an H100."""
    known = [name for name in (*CHIPS, *LIKE) if gpu.startswith(name)]
    nearest = max(known, key=len, default="H100")
    return LIKE.get(nearest, nearest)


def speed_assumption(gpu: str) -> list[str]:
    """What the time of a step on a GPU goes by, where no run on one was known."""
    if gpu.startswith(tuple(MEASURED)):
        return []
    chip = chip_of(gpu)
    alike = (card for card in MEASURED.values() if _in_16_bits(chip_of(card)) == _in_16_bits(chip))
    like = next(alike, None)
    share = f"the share of its data sheet that runs on {like} reached" if like else "a guess"
    return [f"no run on {gpu} is known: its times are {share}; `shardtune bench` measures them"]


def _in_16_bits(chip: Chip) -> Chip:
    return replace(chip, fp8_rows=1.0)


def chip_of(gpu: str) -> Chip:
    """The constants of a GPU."""
    return CHIPS[beginning_of(gpu)]
