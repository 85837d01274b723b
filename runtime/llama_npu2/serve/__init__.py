"""An HTTP server: the APIs that other programs speak, on the engine of many replies (extra `serve`)."""
