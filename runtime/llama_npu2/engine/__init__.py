"""Running a model: plans bound to a device, the KV cache, and sampling."""
