"""Training EAGLE heads: data in, batches out, loss, steps and checkpoints."""
