"""Tasks of EleutherAI's lm-evaluation-harness on an artifact directory: `python -m llama_npu2.lm_eval`."""
