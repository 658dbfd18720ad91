"""Nothing here but judges that import torch."""

collect_ignore = ["judged_heads.py"]
