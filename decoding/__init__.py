"""How is a draft verified? The target-model loop: tree attention, acceptance, KV cache, sampling."""

from redraft.retrieval.errors import import_extra

for _library in ("torch", "transformers"):  # every module here needs both; say so once, with the extra to install
    import_extra(_library, "models")
