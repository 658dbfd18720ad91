"""Block drafters: DFlash's head, and DSpark's with its Markov head."""
