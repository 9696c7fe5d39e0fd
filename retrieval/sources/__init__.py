"""One file per kind of evidence; `redraft.retrieval.blend.gather` is the list of all of them."""
