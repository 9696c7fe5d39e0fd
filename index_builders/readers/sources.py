"""From what the user named to the list of files that will be read, before anything is read.

A source is a file, a folder (walked, hidden and machine-made folders left out), a glob pattern, a folder written by
`datasets.save_to_disk`, or `-` for standard input. Listing first costs one `stat` per file and buys early errors, a
total for the progress bar, and a signature that tells a resumed build whether the corpus is still the same.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from redraft.index_builders.readers.documents import ReadOptions
from redraft.retrieval.index_format import DENSE_MAP, DOCUMENT_ENDS, MANIFEST, SUCCESSOR_IDS

__all__ = ["SourceFile", "list_files", "signature"]

# Files of a folder that are read as text. A file that is named itself is read whatever it is called.
_TEXT_SUFFIXES = """
    .txt .text .md .markdown .mdx .rst .adoc .asciidoc .org .tex .bib .texi .pod .man .csv .tsv .log .srt .vtt .po
    .py .pyi .pyx .pxd .pxi .ipynb .c .h .cc .hh .cpp .hpp .cxx .hxx .inl .cu .cuh .m .mm .cs .java .kt .kts .scala
    .groovy .gradle .go .rs .zig .nim .d .v .sv .svh .vhd .vhdl .swift .dart .js .mjs .cjs .jsx .ts .tsx .mts .cts
    .vue .svelte .html .htm .xhtml .xml .xsd .xsl .css .scss .sass .less .svg .json .json5 .yaml .yml .toml .ini
    .cfg .conf .properties .env .proto .thrift .graphql .gql .sql .prisma .tf .hcl .nix .cmake .mk .bazel .bzl .sh
    .bash .zsh .fish .ps1 .psm1 .bat .cmd .awk .sed .pl .pm .t .rb .rake .erb .php .lua .tcl .r .rmd .jl .hs .lhs
    .ml .mli .fs .fsi .fsx .ex .exs .erl .hrl .clj .cljs .cljc .edn .lisp .lsp .el .scm .rkt .f .f77 .f90 .f95 .for
    .pas .ada .adb .ads .asm .s .vb .vbs .coffee .elm .purs .sol .wat .glsl .vert .frag .hlsl .wgsl .patch .diff
    .j2 .jinja .jinja2 .tmpl .mustache .lean .thy .agda .idr .mjml .rego .cue .dhall .gd .hx .pony .cr .robot
"""
_TEXT_NAMES = """
    README LICENSE LICENCE COPYING AUTHORS CONTRIBUTORS CHANGELOG CHANGES NEWS TODO INSTALL Makefile GNUmakefile
    Dockerfile Containerfile Jenkinsfile Vagrantfile Rakefile Gemfile Procfile BUILD WORKSPACE Justfile
"""
TEXT_SUFFIXES, TEXT_NAMES = frozenset(_TEXT_SUFFIXES.split()), frozenset(_TEXT_NAMES.split())
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "CVS", "_darcs", "__MACOSX"})

# Files that mark an index, or the work folder of a build: neither is text to index.
_OUR_OWN = (*({MANIFEST, name} for name in (DOCUMENT_ENDS, SUCCESSOR_IDS, DENSE_MAP)), {"plan.json", "lock"})

_JSONL = (".jsonl", ".ndjson")
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class SourceFile:
    """One file to read.

    Attributes:
        path: where it is; `Path("-")` is standard input.
        format: "text", "jsonl", "json", "parquet", "arrow", "npy" or "megatron".
        named: whether the user named it (or a pattern that matches it); a file found in a folder may be skipped.
        source: position, among the sources, of the one it belongs to.
        size: bytes on disk; modified: nanoseconds since 1970. Both 0 for standard input.
    """

    path: Path
    format: str
    named: bool
    source: int
    size: int = 0
    modified: int = 0


def list_files(sources: list[str], options: ReadOptions) -> list[SourceFile]:
    """All files of `sources`, source by source, in an order that is the same on every machine.

    Raises FileNotFoundError for a source that does not exist and ValueError for one without a readable file.
    """
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        if source == "-":
            if sources.count("-") > 1:
                raise ValueError("standard input (-) can be read once, but it was named more often")
            files.append(SourceFile(Path("-"), options.stdin_format, True, number))
        elif not source:  # what the shell makes of a variable that is not set; as a path it would be this folder
            raise FileNotFoundError("a source is an empty text; wanted the name of a file or folder")
        elif Path(source).expanduser().exists():
            files += _files_of_path(Path(source).expanduser(), number, options)
        elif glob.has_magic(source):
            matches = sorted(glob.glob(str(Path(source).expanduser()), recursive=True))
            paths = [Path(match) for match in matches if os.path.isfile(match)]
            if not paths:
                raise FileNotFoundError(f"{source}: no file matches this pattern")
            files += [_source_file(path, _format_of(path), True, number) for path in paths]
        else:
            raise FileNotFoundError(f"{source}: no such file or folder")
    return files


def signature(files: list[SourceFile]) -> str:
    """Hexadecimal SHA-256 over every file's path, size and time of change."""
    digest = hashlib.sha256()
    for file in files:
        row = (os.path.abspath(file.path), file.format, file.named, file.source, file.size, file.modified)
        digest.update(json.dumps(row).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _source_file(path: Path, format: str, named: bool, source: int) -> SourceFile:
    status = path.stat()
    return SourceFile(path, format, named, source, status.st_size, status.st_mtime_ns)


def _files_of_path(path: Path, number: int, options: ReadOptions) -> list[SourceFile]:
    if not path.is_dir():
        return [_source_file(path, _format_of(path), True, number)]
    arrow = _saved_dataset(path)
    if arrow:
        return [_source_file(part, "arrow", True, number) for part in arrow]
    files, others = [], 0
    for found in _walk(path, options.exclude):
        format = _format_in_folder(found)
        if format is None:
            others += 1
        else:
            files.append(_source_file(found, format, False, number))
    if not files:
        if _is_our_own(os.listdir(path)):
            raise ValueError(f"{path}: an index or the work folder of a build; wanted what it was built from")
        raise ValueError(f"{path}: no text in this folder ({others} files of other kinds); name such files themselves")
    return files


def _walk(folder: Path, exclude: tuple[str, ...]):
    """Regular files below `folder`, sorted; links to folders are not followed, so there is no way in circles."""
    for root, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in SKIPPED_FOLDERS and not _matches(name, exclude)
        )
        if _is_our_own(names):
            folders.clear()
            continue
        for name in sorted(names):
            path = Path(root, name)
            if not name.startswith(".") and not _matches(name, exclude) and path.is_file():
                yield path


def _is_our_own(names: list[str]) -> bool:
    return any(marks <= set(names) for marks in _OUR_OWN)


def _raise(error: OSError) -> None:
    raise error


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _inner_suffix(path: Path) -> str:
    """The suffix that says what is inside: `.jsonl` for `a.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        return suffixes[-2] if len(suffixes) > 1 else ""
    return suffixes[-1] if suffixes else ""


def _format_of(path: Path) -> str:
    """How to read a file that the user named."""
    suffix = _inner_suffix(path)
    if suffix in _JSONL:
        return "jsonl"
    if suffix in (".json", ".parquet", ".arrow", ".npy"):
        return suffix[1:]
    if suffix in (".bin", ".idx") and path.with_suffix(".idx").exists():
        return "megatron"
    return "text"


def _format_in_folder(path: Path) -> str | None:
    """How to read a file found in a folder; None leaves it alone. There, `.json` is text like any other source."""
    if path.suffix.lower() in (*_COMPRESSED, *_JSONL):
        return "jsonl" if _inner_suffix(path) in _JSONL else None
    if path.suffix.lower() == ".parquet":
        return "parquet"
    return "text" if path.suffix.lower() in TEXT_SUFFIXES or path.name in TEXT_NAMES else None


def _saved_dataset(folder: Path) -> list[Path]:
    """The arrow files of a folder written by `datasets.save_to_disk`, in order; empty for any other folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return [part for split in splits for part in _saved_dataset(folder / split)]
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return []
    parts = json.loads((folder / "state.json").read_text())["_data_files"]
    return [folder / part["filename"] for part in parts]
