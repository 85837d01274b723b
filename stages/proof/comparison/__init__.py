"""Other engines as references: transformers, llama.cpp, and the files that they read."""
