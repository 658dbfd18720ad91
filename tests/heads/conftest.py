"""Nothing here but judges that import torch."""

collect_ignore = ["judged_blocks.py", "judged_heads.py"]
