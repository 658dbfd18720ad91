"""The cost of rounds and training steps, and the programs of other machines."""
