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
    bytes, one for each direction; experts take one, and are restored. It needs `train.precision:
    bf16` and `strategy: ddp` or `expert`. The output head and what an adapter trains stay as they
    are. Needs an adapter, because such weights can't be trained."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository ships. Read it before you allow it."""

    @property
    def attn_implementation(self) -> str | None:
        """As transformers is told it; of a family that we don't know it chooses itself."""
        return None if self.attention == "auto" else self.attention
