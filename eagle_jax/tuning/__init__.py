"""The search for the tree that pays: a few are run for real, the slower half goes."""
