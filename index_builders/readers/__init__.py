"""One file per kind of file that a corpus can lie in; `reading.read_documents` is the list of all of them."""
