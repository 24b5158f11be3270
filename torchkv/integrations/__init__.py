"""torchkv under serving engines: vLLM, SGLang, and the continuous batching of transformers. See docs/integrations.md.

Nothing here is imported by the rest of torchkv, and each module needs the engine that it is named after.
"""
