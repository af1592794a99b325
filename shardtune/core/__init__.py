"""Facts and arithmetic. Nothing here imports torch, transformers or another part of shardtune."""
