"""Training of SSMs: answers of the LLM, packed batches, distillation, boost-tuning; run from a checkout."""
