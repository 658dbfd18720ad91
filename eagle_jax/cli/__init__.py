"""What the scripts share: prompts in, runs of a pair, reports out."""
