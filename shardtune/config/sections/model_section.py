"""`model`: which model a run starts from, and how its frozen weights are stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardtune.config.sections.field_types import Auto
from shardtune.core.job_section import Section
from shardtune.core.setup import Quantization


class ModelSection(Section):
    """Which model to start from."""

    name: Annotated[str, Field(min_length=1)]
    """A built-in name (`shardtune models list`), a local folder, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    attention: Literal["auto", "sdpa", "flex_attention", "flash_attention_2", "eager"] = "auto"
    """Which attention implementation of transformers is used. `auto` takes the best that the
    model's family has on every device: `sdpa`, else `eager`. With `sdpa` a GPU isolates packed
    documents without a mask, where the family allows it."""
    add_tokens: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Special tokens to add to the tokenizer, such as `<|im_start|>`. Where the embedding has no
    spare rows for them, it grows, and so does the output head; a new row starts as the mean of the
    others. An adapter trains them through `modules_to_save`."""
    stop_tokens: Auto | tuple[str, ...] = "auto"
    """Tokens that end an answer. `auto` takes the tokenizer's and the generation config's."""
    quantization: Quantization = "none"
    """How the frozen linear layers are stored: `nf4` takes half a byte per weight (double
    quantization), `int8` one; both are dequantized for each matmul. `fp8` (e4m3) multiplies in 8
    bits, twice as fast on GPUs with FP8 tensor cores (Ada, Hopper and later), and takes two bytes,
    as the transposed weight is stored too; experts take one, and are dequantized. It needs
    `train.precision: bf16` and `strategy: ddp` or `expert`. The output head and what an adapter
    trains stay unquantized. Needs an adapter, because quantized weights can't be trained."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository ships. Read it before you allow it."""

    @property
    def attn_implementation(self) -> str | None:
        """As transformers is told it; of a family that we don't know it chooses itself."""
        return None if self.attention == "auto" else self.attention
