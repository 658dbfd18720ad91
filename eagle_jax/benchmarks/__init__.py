"""How much rounds and training steps cost, and what other machines would compile."""
