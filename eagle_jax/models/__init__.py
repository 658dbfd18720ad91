"""Pure functions over parameter pytrees, batched; they know no tree beyond a mask."""
