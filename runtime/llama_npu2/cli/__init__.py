"""The commands of `llama-npu2`: conversations, measurements, trust, and what they print."""
