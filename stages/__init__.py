"""Build time: from a checkpoint to an artifact directory. May import anything; `runtime` never imports it."""
